"""What several releases cost is what composition says, and never less."""

from __future__ import annotations

import json
import math
import shutil

import dp_accounting
import numpy as np
import pytest
import yaml

import run_program
from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.accounting.gaussian import zcdp_epsilon
from bandmf_tf.accounting.random_participation import BallsInBins
from bandmf_tf.accounting.selection import PrivateSelection, selected_epsilon
from bandmf_tf.cli import budget as tool
from bandmf_tf.evidence.reader import ReportRequest
from bandmf_tf.factorization.strategies import identity
from bandmf_tf.mechanisms.files import mechanism_checksum, save_mechanism
from bandmf_tf.report.budget import compose, load_program
from bandmf_tf.report.document import dump, make_report
from bandmf_tf.runs.ledger import LedgerWriter, Pseudonyms, read_ledger
from cases import (
    B,
    N,
    keras_run,
    ledger_header,
    make_mechanism,
    make_run,
    planned_mechanism,
    refused,
    round_record,
    run_tool,
    sampled_mechanism,
)

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


SPRING = {
    "name": "spring",
    "report": "spring/report.json",
    "evidence_root": ".",
    "tuning": "none",
}
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


EVENT = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0))


def test_amplified_releases_are_composed_by_their_privacy_losses(folder):
    again = {**SAMPLED, "name": "again"}
    budget = _composed(folder, SAMPLED, again)
    exact = _pld_epsilon(dp_accounting.SelfComposedDpEvent(EVENT, 48))
    total = budget.last_totals[0]
    assert total.epsilon == pytest.approx(exact, rel=2e-3)
    assert total.accounting == "privacy loss distributions of amplified releases"
    assert all(cost.is_amplified for cost in budget.costs)
    assert any("coins of its own" in question for question in budget.open_questions())
    # Beside Gaussian releases, too, in whatever order they come.
    mixed = _composed(folder, SAMPLED, AUTUMN, SPRING)
    gaussians = (dp_accounting.GaussianDpEvent(1 / cost.mu) for cost in mixed.costs[1:])
    exact = _pld_epsilon(dp_accounting.SelfComposedDpEvent(EVENT, 24), *gaussians)
    total = mixed.last_totals[0]
    assert total.epsilon == pytest.approx(exact, rel=2e-3)
    assert total.accounting == "privacy loss distributions of amplified and Gaussian releases"
    assert not any("coins of its own" in question for question in mixed.open_questions())
    other = _composed(folder, SPRING, AUTUMN, SAMPLED).last_totals[0]
    assert other.epsilon == pytest.approx(total.epsilon, rel=1e-3)
    assert mixed.totals[0].epsilon == budget.totals[0].epsilon == budget.costs[0].epsilon


def test_amplified_runs_are_composed_from_their_evidence(tmp_path, capsys):
    """A report holds none of the losses; whoever edits what it holds is refused."""
    runs = [keras_run(tmp_path / "one"), keras_run(tmp_path / "two", rounds_completed=N // 2)]
    assert run_tool(f"--run={runs[0]}", f"--output={tmp_path / 'report'}") == 0
    capsys.readouterr()
    releases = [
        {"name": "one", "report": "report/report.json", "evidence_root": "."},
        {"name": "two", "run": "two"},
    ]
    budget = _composed(tmp_path, *releases)
    norm = sampled_mechanism().strategy.column_norms().max()
    noise = sampled_mechanism().noise_multiplier / norm
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(noise))
    exact = _pld_epsilon(dp_accounting.SelfComposedDpEvent(event, N // B + N // 2 // B))
    total = budget.last_totals[0]
    assert total.epsilon == pytest.approx(exact, rel=2e-3)
    assert total.accounting == "privacy loss distributions of amplified releases"
    path = tmp_path / "report" / "report.json"
    report = json.loads(path.read_text())
    for name in ("epsilon_amplified", "epsilon", "curve"):
        value = report[name]
        less = 0.5 * value if name != "curve" else [{**p, "epsilon": 0.1} for p in value]
        path.write_text(json.dumps({**report, name: less}))
        status, _, err = _tool(capsys, f"--program={tmp_path / 'program.yaml'}")
        assert (status, name in err) == (2, True)


def test_a_release_known_by_rho_alone_is_composed_by_all_that_has_it(folder):
    alone = _composed(folder, OLD, {**OLD, "name": "older"}).last_totals[0]
    assert (alone.epsilon, alone.accounting) == (zcdp_epsilon(0.5, DELTA), "zCDP")
    for other in (AUTUMN, SAMPLED):
        budget = _composed(folder, OLD, other)
        total = budget.last_totals[0]
        assert total.rho == 0.25 + budget.costs[1].rho
        kind = "amplified" if other is SAMPLED else "Gaussian"
        assert total.accounting == f"privacy loss distributions of {kind} and zCDP releases"
        # It might have been a Gaussian release of this rho.
        event = dp_accounting.GaussianDpEvent(1 / budget.costs[1].mu)
        if other is SAMPLED:
            event = dp_accounting.SelfComposedDpEvent(EVENT, 24)
        least = _pld_epsilon(dp_accounting.GaussianDpEvent(math.sqrt(2.0)), event)
        assert least < total.epsilon <= 1.002 * zcdp_epsilon(total.rho, DELTA)


def test_certified_releases_are_composed_by_their_guarantees(tmp_path):
    """Balls in bins have no losses that could be added, but guarantees at many deltas."""
    scheme = BallsInBins(12, 4)
    for name in ("one", "two"):
        mechanism = make_mechanism(identity(12), sampling=scheme, noise_multiplier=3.0)
        save_mechanism(mechanism, tmp_path / f"{name}.bandmf")
    releases = [{"name": name, "mechanism": f"{name}.bandmf"} for name in ("one", "two")]
    budget = _composed(tmp_path, *releases)
    total = budget.last_totals[0]
    at_share = scheme.amplified(identity(12), 3.0, DELTA / 3).epsilon
    assert total.accounting == "privacy loss distributions of amplified releases"
    assert max(cost.epsilon for cost in budget.costs) < total.epsilon < 2 * at_share
    # What is certified is worth its samples: without them it would be more.
    assert total.epsilon < 2 * scheme.bounded(identity(12), 3.0, DELTA / 3).epsilon


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


def test_the_evidence_of_a_report_is_under_the_folder_that_the_program_names(folder, capsys):
    """By default the report's own; a stranger may have made the report."""
    status, _, err = _tool(capsys, f"--program={_write(folder, {**SPRING, 'evidence_root': None})}")
    assert (status, "spring has no run, on which" in err) == (2, True)
    moved = folder / "elsewhere"
    shutil.copytree(folder / "run", moved / "run")
    budget = _composed(folder, {**SPRING, "evidence_root": "elsewhere"})
    assert budget.last_totals == _composed(folder, SPRING).last_totals
    (moved / "run" / "notes.json").symlink_to(folder / "planned.bandmf")
    path = _write(folder, {**SPRING, "evidence_root": "elsewhere"})
    status, _, err = _tool(capsys, f"--program={path}")
    assert (status, "notes.json leads out of" in err) == (2, True)
    for root in ("nowhere", 3):
        path = _write(folder, {**SPRING, "evidence_root": root})
        assert "evidence_root must be a folder" in _tool(capsys, f"--program={path}")[2]
    path = _write(folder, {**OLD, "evidence_root": "."})
    assert "exactly one of" in _tool(capsys, f"--program={path}")[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("delta: 1.0e-7", "releases must be a list"),
        ("delta: 2\nreleases: [{name: a, rho: 1}]", "delta"),
        ("releases: [{name: a, rho: 1}]", "delta"),
        ("delta: 0.1\nreleases: [{name: a, rho: -1}]", "rho must be positive"),
        ("delta: 0.1\nreleases: [{name: a, rho: .nan}]", "rho must be"),
        ("delta: 0.1\nreleases: [{name: a}]", "exactly one of report, run, mechanism, rho"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1, report: b}]", "exactly one of"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1, roh: 2}]", "exactly one of"),
        (
            "delta: 0.1\nreleases: [{name: a, rho: 1, rho: 0.1}]",
            "yaml: there are two entries of one",
        ),
        ("delta: 0.1\nreleases: [{name: a, rho: !!timestamp x}]", "is not a YAML file"),
        ("delta: 0.1\nreleases: [{name: a, rho: !!bool maybe}]", "is not a YAML file"),
        ("delta: 0.1\nmax_rho: 1:30\nreleases: [{name: a, rho: 1}]", "1:30 is read as several"),
        ("delta: 0.1\nmax_rho: 1:30.5\nreleases: [{name: a, rho: 1}]", "1:30.5 is read as several"),
        ("delta: 0.1\nreleases: [{name: a, rho: 010}]", "010 is read as several numbers"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1}]\nreleases: []", "two entries of one name"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1}, {name: a, rho: 1}]", "name of its own"),
        ("delta: 0.1\nbudget: 3\nreleases: [{name: a, rho: 1}]", "unknown fields ['budget']"),
        ("delta: 0.1\nmax_rho: 0\nreleases: [{name: a, rho: 1}]", "max_rho"),
        ("delta: 0.1\nreleases: [{name: a, mechanism: gone.bandmf}]", "gone.bandmf"),
        ("delta: 0.1\nreleases: [{name: a, report: gone.json}]", "gone.json"),
        ("delta: 0.1\nreleases: [{name: a, rho: 1, populations: phones}]", "list of names"),
        ("delta: 0.1\ndisjoint_populations: 1\nreleases: [{name: a, rho: 1}]", "true or false"),
        ("delta: 0.1\nreleases: [{name: a, rho: true}]", "rho must be a number. Found True"),
        (
            "delta: 0.001\nmax_epsilon: 9\nreleases: [{name: a, rho: 1}]",
            "max_epsilon limits nothing",
        ),
        ('delta: 0.1\nreleases: [{name: "a\\nb", rho: 1}]', r"in one line. Found 'a\nb'"),
        ('delta: 0.1\nreleases: [{name: "a\\e[2K", rho: 1}]', r"Found 'a\x1b[2K'"),
        ('delta: 0.1\nreleases: [{name: "a\\u202eb", rho: 1}]', r"Found 'a\u202eb'"),
        ('delta: 0.1\nreleases: [{name: "a\\ud800", rho: 1}]', r"Found 'a\ud800'"),
        ('delta: 0.1\nreleases: [{name: " ", rho: 1}]', "in one line"),
        (f"delta: 0.1\nreleases: [{{name: a{80 * ' '}b, rho: 1}}]", "without rows of spaces"),
        ('delta: 0.1\nreleases: [{name: a, rho: 1, populations: ["b\\rc"]}]', "a population must"),
        ('delta: 0.1\nreleases: [{name: a, mechanism: "a\\0b"}]', "mechanism must name a file"),
        ('delta: 0.1\nreleases: [{name: a, run: "\\ud800"}]', "run must name a file"),
        ("delta: 0.1\nreleases: [{name: a, report: /}]", "report must be a file. Found '/'"),
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


# Runs whose ledgers name units by the same pseudonyms.

_SALT = bytes(range(32))


def _joined_run(folder, name, clients, *, salt=_SALT, **flags):
    """Makes a run in which these clients take part, one a round, and its report."""
    run = folder / name
    run.mkdir(parents=True)
    mechanism = planned_mechanism()
    save_mechanism(mechanism, run / "mechanism.bandmf")
    checksum, pseudonyms = mechanism_checksum(mechanism), Pseudonyms(salt)
    header = ledger_header(
        mechanism_checksum=checksum,
        num_rounds=N,
        clients_per_round=1,
        participation_recording="pseudonymous",
        salt_id=pseudonyms.salt_id,
    )
    with LedgerWriter.create(run / "ledger.jsonl", header) as writer:
        for number, client in enumerate(clients):
            names = pseudonyms.of([client] if isinstance(client, str) else client)
            writer.append(
                round_record(
                    number,
                    num_participants=len(names),
                    mechanism_checksum=checksum,
                    participants=names,
                )
            )
    output = folder / f"{name}_report"
    output.mkdir()
    report, _ = make_report(ReportRequest(run=run, **flags))
    (output / "report.json").write_text(dump(report.to_json()))
    report = f"{name}_report/report.json"
    return {"name": name, "report": report, "evidence_root": ".", "tuning": "none"}


def _cycle(*active, once=()):
    """Clients of all rounds: those that are active every six rounds, others once."""
    others = iter(once)
    return [active[i % B] if i % B < len(active) else next(others) for i in range(N)]


def _brute_force(*runs):
    """Returns the largest mu of a unit, from the whole matrix and every unit's own rounds."""
    mechanism = planned_mechanism()
    matrix = mechanism.strategy.materialize()
    worst = 0.0
    for unit in {client for clients in runs for client in clients}:
        total = 0.0
        for clients in runs:
            columns = matrix[:, [i for i, client in enumerate(clients) if client == unit]]
            # Contributions of norm 1, in the worst directions: all entries have one sign.
            total += float(np.sum(np.abs(columns.T @ columns))) / mechanism.noise_multiplier**2
        worst = max(worst, total)
    return math.sqrt(worst)


def test_the_worst_unit_counts_where_pseudonyms_can_be_joined(tmp_path):
    """Half of the devices are active in spring, the others in autumn; each is there in both."""
    first, second = [f"a{i}" for i in range(3)], [f"b{i}" for i in range(3)]
    spring = _cycle(*first, once=[*second, *(f"c{i}" for i in range(9))])
    autumn = _cycle(*second, once=[*first, *(f"c{i}" for i in range(9))])
    releases = [_joined_run(tmp_path, "spring", spring), _joined_run(tmp_path, "autumn", autumn)]
    budget = _composed(tmp_path, *releases)
    total = budget.last_totals[0]
    mu = _brute_force(spring, autumn)
    assert total.rho == pytest.approx(mu**2 / 2, rel=1e-9)
    simple = sum(cost.rho for cost in budget.costs)
    assert total.rho < 0.8 * simple
    assert total.accounting.endswith("added unit by unit (100 % of pseudonyms recur)")
    exact = _pld_epsilon(dp_accounting.GaussianDpEvent(1 / mu))
    assert total.epsilon == pytest.approx(exact, rel=2e-3)
    # A release of which less is known is added to all of that.
    beside = _composed(tmp_path, *releases, OLD).last_totals[0]
    assert beside.rho == pytest.approx(total.rho + 0.25)
    # Nothing of units leaves the tool.
    assert "units" not in json.dumps(budget.to_json())


def test_units_that_come_back_soon_bear_the_sensitivity_of_their_own_separation(tmp_path):
    """Columns of neighbouring rounds overlap; the bound is at least what brute force finds."""
    spring = ["a", "a", "b", "a", *(f"c{i}" for i in range(N - 4))]
    autumn = [*(f"c{i}" for i in range(N - 4)), "b", "a", "b", "b"]
    releases = [_joined_run(tmp_path, "spring", spring), _joined_run(tmp_path, "autumn", autumn)]
    budget = _composed(tmp_path, *releases)
    mu = math.sqrt(2 * budget.last_totals[0].rho)
    assert _brute_force(spring, autumn) * (1 - 1e-9) <= mu
    assert mu < math.sqrt(sum(cost.mu**2 for cost in budget.costs))


def test_units_that_contribute_twice_to_a_round_count_twice(tmp_path):
    spring = [["a", "a"], *(["b"] for _ in range(1)), *([f"c{i}"] for i in range(N - 2))]
    autumn = [*([f"c{i}"] for i in range(N - 1)), ["a"]]
    releases = [_joined_run(tmp_path, "spring", spring), _joined_run(tmp_path, "autumn", autumn)]
    budget = _composed(tmp_path, *releases)
    norm, noise = planned_mechanism().strategy.column_norms(), planned_mechanism().noise_multiplier
    worst = (4 * norm[0] ** 2 + norm[-1] ** 2) / noise**2
    assert budget.last_totals[0].rho == pytest.approx(worst / 2, rel=1e-9)


@pytest.mark.parametrize("kind", ["salt", "names", "limits"])
def test_what_cannot_be_joined_is_added_as_if_somebody_was_worst_in_both(tmp_path, kind):
    names = [f"a{i}" for i in range(N)]
    spring = _joined_run(tmp_path, "spring", names)
    if kind == "salt":  # Of another salt.
        autumn = _joined_run(tmp_path, "autumn", names, salt=bytes(32))
    elif kind == "names":  # A liar's header may name any salt.
        autumn = _joined_run(tmp_path, "autumn", [f"b{i}" for i in range(N)])
    else:  # Somebody states worse than the ledger shows.
        limits = {"min_separation": 4, "max_participations": 2}
        autumn = _joined_run(tmp_path, "autumn", names[::-1], **limits)
    budget = _composed(tmp_path, spring, autumn)
    assert budget.last_totals[0].rho == pytest.approx(sum(cost.rho for cost in budget.costs))
    told = any("0 % of the pseudonyms recur" in question for question in budget.open_questions())
    assert told == (kind == "names")


@pytest.mark.parametrize(("recurring", "share"), [(1, "6.66 %"), (7, "46.6 %"), (8, "53.3 %")])
def test_units_that_got_new_pseudonyms_do_not_pass_the_gate(tmp_path, capsys, recurring, share):
    """Of 15 pseudonyms under one salt: below a half the active ones may be the same people's."""
    once = [f"c{i}" for i in range(12)]
    spring = _cycle("a0", "a1", "a2", once=once)
    autumn = _cycle("b0", "b1", "b2", once=[*once[:recurring], *(f"d{i}" for i in range(12))])
    releases = [_joined_run(tmp_path, "spring", spring), _joined_run(tmp_path, "autumn", autumn)]
    budget = _composed(tmp_path, *releases)
    total, worst = budget.last_totals[0], sum(cost.rho for cost in budget.costs)
    is_joined = recurring == 8
    assert (total.rho < 0.9 * worst) == is_joined
    assert (f"({share} of pseudonyms recur)" in total.accounting) == is_joined
    # The gate judges the figure of both together, and what is open stands beside it.
    path = _write(tmp_path, *releases, max_rho=0.9 * worst)
    status, out, _ = _tool(capsys, f"--program={path}")
    assert status == (0 if is_joined else 3)
    told = f"autumn: {share} of the pseudonyms recur, though one salt" in " ".join(out.split())
    assert told != is_joined


def test_runs_of_the_library_can_share_a_salt(tmp_path):
    """A salt that is copied into the folder of a new run makes pseudonyms that can be joined."""
    with run_program.start(tmp_path / "first") as run:
        run.commit(run_program.result(0))
    secret = tmp_path / "second" / "secret"
    secret.mkdir(0o700, parents=True)
    shutil.copy2(tmp_path / "first" / "secret" / "participation_salt", secret)
    with run_program.start(tmp_path / "second") as run:
        run.commit(run_program.result(0))
    ledgers = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("first", "second")]
    assert ledgers[0].header.salt_id == ledgers[1].header.salt_id
    assert ledgers[0].records[0].participants == ledgers[1].records[0].participants


def test_several_runs_are_composed_by_the_report_as_by_a_program_file(folder, tmp_path, capsys):
    second = make_run(tmp_path / "run")
    runs = [f"--run={folder / 'run'}", f"--run={second}"]
    assert run_tool(*runs, f"--delta={DELTA}", f"--output={tmp_path / 'both'}", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "both" / "budget.json").read_text())
    releases = [{"name": str(path), "run": str(path)} for path in (folder / "run", second)]
    assert printed == _composed(tmp_path, *releases).to_json()
    by_report = _composed(folder, SPRING, {"name": "second", "run": str(second)})
    assert printed["totals"][-1]["epsilon"] == by_report.totals[-1].epsilon
    assert printed["totals"][-1]["rho"] > 1.9 * printed["totals"][0]["rho"]
    limit = printed["totals"][-1]["epsilon"]
    for epsilon, status in ((1.001 * limit, 0), (0.999 * limit, 3)):
        assert run_tool(*runs, f"--delta={DELTA}", f"--max_epsilon={epsilon}") == status
        capsys.readouterr()
        program = _write(folder, SPRING, {"name": "second", "run": str(second)})
        found = _tool(capsys, f"--program={program}", f"--max_epsilon={epsilon}")[0]
        assert found == status
    assert "is for several runs" in refused(capsys, runs[0], "--max_epsilon=1")
    assert "max_rho must be positive" in refused(capsys, *runs, f"--delta={DELTA}", "--max_rho=0")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "Found no --delta"),
        (["--delta=1e-7", "--max_participations=1"], "Found --max_participations"),
        (["--delta=1e-7", "--verify=report.json"], "Found --verify"),
    ],
)
def test_several_runs_take_no_other_numbers(folder, capsys, more, words):
    run = f"--run={folder / 'run'}"
    assert words in refused(capsys, run, run, *more)
    assert "they are one run" in refused(capsys, run, run, "--delta=1e-7")


# Liars.


def test_one_run_under_two_names_is_refused(tmp_path, capsys):
    spring = _joined_run(tmp_path, "spring", [f"a{i}" for i in range(N)])
    again = tmp_path / "again"  # A copy elsewhere, reported with another delta.
    shutil.copytree(tmp_path / "spring", again)
    assert run_tool(f"--run={again}", "--delta=1e-9", f"--output={tmp_path / 'again_report'}") == 0
    capsys.readouterr()
    copied = {**spring, "name": "again", "report": "again_report/report.json"}
    status, _, err = _tool(capsys, f"--program={_write(tmp_path, spring, copied)}")
    assert status == 2
    assert "they are one run" in err


def test_populations_that_pseudonyms_show_to_overlap_are_not_disjoint(tmp_path, capsys):
    names = [f"a{i}" for i in range(N)]
    releases = [
        {**_joined_run(tmp_path, "spring", names), "populations": ["phones"]},
        {**_joined_run(tmp_path, "autumn", names[::-1]), "populations": ["tablets"]},
    ]
    capsys.readouterr()
    path = _write(tmp_path, *releases, disjoint_populations=True)
    status, _, err = _tool(capsys, f"--program={path}")
    assert status == 2
    assert "24 pseudonyms of 'spring' are in 'autumn', too" in err


@pytest.mark.parametrize(
    "other",
    # The last one begins with a Cyrillic letter.
    ["Phones", "phones ", "ph\u00f3nes", "\uff50hones", "pho-nes", "\u0440hones"],
)
def test_one_population_under_two_names_is_refused(folder, capsys, other):
    releases = [{**OLD, "name": name, "populations": [name]} for name in ("phones", other)]
    path = _write(folder, *releases, disjoint_populations=True)
    status, _, err = _tool(capsys, f"--program={path}")
    assert status == 2
    assert "look like one" in err


@pytest.mark.parametrize("name", ["everybody", "Everybody", "EVERYB\u00d6DY"])
def test_everybody_is_no_population_beside_others(folder, capsys, name):
    """Phones would seem to cost nothing where everybody took part."""
    releases = [{**OLD, "name": who, "populations": [who]} for who in ("phones", name)]
    path = _write(folder, *releases, disjoint_populations=True)
    status, _, err = _tool(capsys, f"--program={path}")
    assert (status, "must be left out for everybody" in err) == (2, True)


def test_a_run_whose_name_would_forge_lines_is_refused(folder, capsys):
    run = f"--run={folder / 'run'}"
    message = refused(capsys, run, "--run=run\nExceeded: nothing", "--delta=1e-7")
    assert r"Found 'run\nExceeded: nothing'" in message


# What a reader must know beside the figures.


def test_budgets_judge_delta_as_reports_do(folder, capsys):
    """At delta = 0.9 every epsilon is 0: no limit is kept by that."""
    run = f"--run={folder / 'run'}"
    for limit, status in (([], 0), (["--max_epsilon=0.5"], 2)):
        path = _write(folder, OLD, delta=0.9)
        assert _tool(capsys, f"--program={path}", *limit)[0] == status
        assert run_tool(run, "--run=x", "--delta=0.9", *limit) == 2  # One way or another.
        capsys.readouterr()
    large = compose(load_program(_write(folder, SPRING, delta=0.2))).open_questions()
    assert sum("delta = 0.2 is large" in question for question in large) == 1
    # Six devices took part.
    assert any(
        "spring: delta = 0.2 is not smaller than one over the number" in question
        for question in large
    )
    small = compose(load_program(_write(folder, {**SPRING, "tuning": " "}))).open_questions()
    assert small == (
        "spring: how its hyperparameters were found is not said; no figure covers it.",
    )
    assert not any("delta" in question for question in small)


def test_costs_of_units_that_are_not_known_are_open(folder):
    budget = _composed(folder, SPRING, SAMPLED, OLD)
    unknown = [q for q in budget.open_questions() if "which unit its cost is of" in q]
    assert [question.partition(":")[0] for question in unknown] == ["sampled", "old"]
    assert not any("which unit" in q for q in _composed(folder, OLD).open_questions())


def test_examples_and_devices_are_not_added(folder, capsys):
    keras_run(folder / "keras")
    status, _, err = _tool(
        capsys, f"--program={_write(folder, SPRING, {'name': 'keras', 'run': 'keras'})}"
    )
    assert (status, "['device', 'example']" in err) == (2, True)


# Tuning that is accounted for.


def test_a_selected_release_costs_more_and_has_no_rho(folder, capsys, tmp_path):
    tuning = {"private_selection": "geometric", "mean": 8}
    chosen = {**SPRING, "tuning": tuning}
    budget = _composed(folder, chosen, AUTUMN)
    plain = _composed(folder, SPRING, AUTUMN)
    selection = PrivateSelection(8, "geometric")
    assert budget.costs[0].epsilon == selected_epsilon([(plain.costs[0].rho, selection)], 0, DELTA)
    total = budget.last_totals[0]
    assert total.rho is None
    expected = selected_epsilon([(plain.costs[0].rho, selection)], plain.costs[1].rho, DELTA)
    assert total.epsilon == expected > plain.last_totals[0].epsilon
    assert any("drawn as stated" in question for question in budget.open_questions())
    quoted = _composed(folder, {**chosen, "tuning": {**tuning, "mean": "8"}}, AUTUMN)
    assert quoted.last_totals == budget.last_totals
    path = _write(folder, chosen, AUTUMN, max_epsilon=0.99 * expected)
    status, out, _ = _tool(capsys, f"--program={path}", f"--output={tmp_path / 'out'}")
    assert status == 3
    assert "the best of a geometric number of runs, 8 in the mean" in out
    assert "geometric" in (tmp_path / "out" / "budget.html").read_text()
    document = json.loads((tmp_path / "out" / "budget.json").read_text())
    assert document["releases"][0]["selection"] == {"mean": 8, "distribution": "geometric"}


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ({"private_selection": "geometric", "mean": 8}, "max_rho cannot be checked"),
        ({"private_selection": "geometric"}, "tuning must be words"),
        ({"private_selection": "uniform", "mean": 8}, "distribution must be one of"),
        ({"private_selection": "geometric", "mean": "many"}, "mean"),
        ({"private_selection": "geometric", "mean": 0.5}, "mean"),
        ({"private_selection": "geometric", "mean": True}, "mean must be a number"),
        ({"private_selection": ["geometric"], "mean": 2}, "distribution must be one of"),
        ([12], "exactly one of"),
    ],
)
def test_tuning_that_cannot_be_accounted_for_is_refused(folder, capsys, tuning, words):
    path = _write(folder, {**OLD, "tuning": tuning}, max_rho=9, name="tuning.yaml")
    status, _, err = _tool(capsys, f"--program={path}")
    assert status == 2
    assert words in err
    assert len(err.splitlines()) == 1
