"""What several releases cost is what composition says, and never less."""

from __future__ import annotations

import json
import math
import shutil

import dp_accounting
import pytest
import yaml

from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.accounting.gaussian import zcdp_epsilon
from bandmf_tf.cli import budget as tool
from bandmf_tf.factorization.strategies import identity
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.report.budget import compose, load_program
from cases import make_mechanism, make_run, planned_mechanism, run_tool

DELTA = 1e-7


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
    """Two mechanisms, one amplified, and a report; look and do not touch."""
    folder = tmp_path_factory.mktemp("releases")
    save_mechanism(planned_mechanism(), folder / "planned.bandmf")
    sampling = PoissonSampling(24, 1, 0.05)
    sampled = make_mechanism(identity(24), sampling=sampling, noise_multiplier=2.0)
    save_mechanism(sampled, folder / "sampled.bandmf")
    assert run_tool(f"--run={make_run(folder / 'run')}", f"--output={folder / 'spring'}") == 0
    return folder


SPRING = {"name": "spring", "report": "spring/report.json", "tuning": "none"}
AUTUMN = {"name": "autumn", "mechanism": "planned.bandmf"}
SAMPLED = {"name": "sampled", "mechanism": "sampled.bandmf"}
OLD = {"name": "old", "rho": 0.25}


def _write(folder, *releases, name="program.yaml", **settings):
    path = folder / name
    path.write_text(yaml.safe_dump({"delta": DELTA, "releases": list(releases), **settings}))
    return path


def _composed(folder, *releases, **settings):
    return compose(load_program(_write(folder, *releases, **settings)))


def _tool(capsys, *arguments):
    status = tool.main(["bandmf-budget", *map(str, arguments)])
    return status, *capsys.readouterr()


def _pld_epsilon(*events):
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(DELTA)


def test_gaussian_releases_compose_exactly(folder):
    budget = _composed(folder, SPRING, AUTUMN)
    spring, autumn = budget.costs
    assert (spring.basis, autumn.basis) == ("observed", "planned")
    assert (spring.unit, autumn.unit) == ("device", None)
    for cost in budget.costs:
        assert cost.rho == pytest.approx(cost.mu**2 / 2, rel=1e-9)
    (first, both) = budget.totals
    assert first.epsilon == pytest.approx(spring.epsilon, rel=1e-9)
    assert both.rho == spring.rho + autumn.rho
    exact = _pld_epsilon(*(dp_accounting.GaussianDpEvent(1 / cost.mu) for cost in budget.costs))
    assert both.epsilon == pytest.approx(exact, rel=2e-3)
    assert max(spring.epsilon, autumn.epsilon) < both.epsilon < spring.epsilon + autumn.epsilon


def test_amplified_releases_are_added_where_that_is_less(folder):
    again = {**SAMPLED, "name": "again"}
    budget = _composed(folder, SAMPLED, again)
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0))
    exact = _pld_epsilon(dp_accounting.SelfComposedDpEvent(event, 48))
    total = budget.last_totals[0]
    unamplified = _pld_epsilon(*(dp_accounting.GaussianDpEvent(1 / c.mu) for c in budget.costs))
    assert exact < total.epsilon < 0.5 * unamplified
    assert total.accounting.startswith("amplified")
    # Its share of delta is smaller, so each costs more than by itself.
    assert total.epsilon == math.fsum(cost.amplified for cost in budget.costs)
    assert all(cost.amplified > cost.epsilon for cost in budget.costs)
    # Beside a Gaussian release, too, and never worse than without amplification.
    mixed = _composed(folder, SAMPLED, AUTUMN)
    gaussian = dp_accounting.GaussianDpEvent(1 / mixed.costs[1].mu)
    least = _pld_epsilon(dp_accounting.SelfComposedDpEvent(event, 24), gaussian)
    assert least < mixed.last_totals[0].epsilon
    assert mixed.last_totals[0].epsilon <= 1.002 * _pld_epsilon(
        gaussian, dp_accounting.GaussianDpEvent(1 / mixed.costs[0].mu)
    )


def test_a_release_known_by_rho_alone_composes_by_zcdp(folder):
    budget = _composed(folder, OLD, AUTUMN)
    total = budget.last_totals[0]
    assert total.rho == 0.25 + budget.costs[1].rho
    assert total.epsilon == zcdp_epsilon(total.rho, DELTA)
    assert total.accounting == "zCDP"
    beside = _composed(folder, OLD, SAMPLED).last_totals[0]
    sampled = _composed(folder, SAMPLED, OLD).costs[0]
    assert beside.epsilon == pytest.approx(
        min(
            zcdp_epsilon(beside.rho, DELTA),
            zcdp_epsilon(0.25, DELTA * 2 / 3) + sampled.amplified,
        )
    )


def test_populations_are_disjoint_only_if_the_file_says_so(folder):
    phones = {**AUTUMN, "populations": ["phones"]}
    tablets = {**OLD, "populations": ["tablets"]}
    together = _composed(folder, phones, tablets, SPRING)
    assert [total.population for total in together.last_totals] == ["everybody"]
    apart = _composed(folder, phones, tablets, SPRING, disjoint_populations=True)
    totals = {total.population: total for total in apart.last_totals}
    costs = {cost.name: cost for cost in apart.costs}
    assert totals["phones"].rho == costs["autumn"].rho + costs["spring"].rho
    assert totals["tablets"].rho == costs["old"].rho + costs["spring"].rho
    assert any("operator's word" in question for question in apart.open_questions())


def test_the_tool_says_what_is_left_and_trips_where_it_is_exceeded(folder, capsys, tmp_path):
    path = _write(folder, SPRING, AUTUMN, max_epsilon=100, max_rho=50)
    status, out, _ = _tool(capsys, f"--program={path}", f"--output={tmp_path / 'out'}")
    assert status == 0
    assert "left: " in out
    assert "autumn: how its hyperparameters were found is not said" in out
    assert "spring: how" not in out
    page = (tmp_path / "out" / "budget.html").read_text()
    assert "within the budget" in page
    document = json.loads((tmp_path / "out" / "budget.json").read_text())
    assert document["excesses"] == []
    rho = document["totals"][-1]["rho"]
    # On both sides of the limit.
    for limit, expected in ((1.0001 * rho, 0), (0.9999 * rho, 3)):
        path = _write(folder, SPRING, AUTUMN, max_rho=limit)
        status, out, _ = _tool(capsys, f"--program={path}")
        assert status == expected
        assert ("Exceeded: everybody: rho is" in out) == (expected == 3)


def test_reports_are_computed_again(folder, tmp_path, capsys):
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    path = own / "spring" / "report.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, "rho": 0.5 * report["rho"]}))
    status, _, err = _tool(capsys, f"--program={_write(own, SPRING)}")
    assert status == 2
    assert "rho" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("delta: 1.0e-7", "releases must be a list"),
        ("delta: 2\nreleases: [{name: a, rho: 1}]", "delta"),
        ("releases: [{name: a, rho: 1}]", "delta"),
        ("delta: 0.1\nreleases: [{name: a, rho: -1}]", "rho must be positive"),
        ("delta: 0.1\nreleases: [{name: a, rho: .nan}]", "rho must be"),
        ("delta: 0.1\nreleases: [{name: a}]", "exactly one of report, mechanism, rho"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1, report: b}]", "exactly one of"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1, roh: 2}]", "exactly one of"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1, rho: 0.1}]", "two entries of one name"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1}]\nreleases: []", "two entries of one name"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1}, {name: a, rho: 1}]", "name of its own"),
        ("delta: 0.1\nbudget: 3\nreleases: [{name: a, rho: 1}]", "unknown fields ['budget']"),
        ("delta: 0.1\nmax_rho: 0\nreleases: [{name: a, rho: 1}]", "max_rho"),
        ("delta: 0.1\nreleases: [{name: a, mechanism: gone.bandmf}]", "gone.bandmf"),
        ("delta: 0.1\nreleases: [{name: a, report: gone.json}]", "gone.json"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1, populations: phones}]", "list of names"),
        ("delta: 0.1\ndisjoint_populations: 1\nreleases: [{name: a, rho: 1}]", "true or false"),
        ("delta: [", "is not a YAML file"),
        ("- 1", "`name: value`"),
    ],
)
def test_wrong_programs_are_refused_in_one_sentence(text, words, tmp_path, capsys):
    path = tmp_path / "program.yaml"
    path.write_text(text)
    status, out, err = _tool(capsys, f"--program={path}")
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
