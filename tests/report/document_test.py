from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
import yaml

from bandmf_tf import schemas
from bandmf_tf._numbers import round_down
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.report import document as document_module
from bandmf_tf.report.document import PrivacyReport, dump, make_report, read_report, verify_report
from bandmf_tf.report.facts import SECTORS
from bandmf_tf.report.registry import registry_entry
from bandmf_tf.report.statement import (
    opening,
    statement_markdown,
    statement_text,
)
from cases import (
    FACTS,
    KEYS,
    ROOT,
    B,
    K,
    make_run,
    number_places,
    planned_mechanism,
    refused,
    run_tool,
    verify,
    write_log,
)

INTERNAL = "--edition=internal"
FILES = {"statement.txt", "statement.md", "report.json", "deployment.yaml", "report.html"}


@pytest.fixture
def mechanism(tmp_path):
    path = tmp_path / "mechanism.bandmf"
    save_mechanism(planned_mechanism(), path)
    return path


@pytest.fixture(scope="module", params=["banded", "blt"])
def run_report(tmp_path_factory, request):
    """A folder with a run and its report; look and do not touch."""
    folder = tmp_path_factory.mktemp("run_report")
    run = make_run(folder / "run", kind=request.param)
    assert run_tool(f"--run={run}", "--delta=1e-8", f"--output={folder / 'out'}", INTERNAL) == 0
    return folder


@pytest.fixture(scope="module", params=["banded", "blt"])
def _log_report(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("log_report")
    save_mechanism(planned_mechanism(kind=request.param), folder / "mechanism.bandmf")
    arguments = [f"--mechanism={folder / 'mechanism.bandmf'}"]
    arguments.append(f"--participation={write_log(folder)}")
    assert run_tool(*arguments, f"--output={folder / 'out'}", INTERNAL) == 0
    return folder


@pytest.fixture
def log_report(_log_report, tmp_path, capsys):
    """A folder of its own with a mechanism, a log and their report."""
    folder = tmp_path / "log_report"
    shutil.copytree(_log_report, folder)
    capsys.readouterr()
    return folder


def test_a_run_gives_all_files_and_a_valid_report(run_report, capsys):
    output = run_report / "out"
    assert {path.name for path in output.iterdir()} == FILES
    document = json.loads((output / "report.json").read_text())
    schema = importlib.resources.files(schemas) / "privacy-report-v2.schema.json"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema.read_text()))
    jsonschema.validate(document, json.loads(schema.read_text()))
    assert (document["min_separation"], document["max_participations"]) == (B, K)
    assert document["min_separation_basis"] == document["max_participations_basis"] == "observed"
    assert document["delta"] == 1e-8
    assert document["plan_was_kept"]
    assert document["unit"] == "device"
    assert run_tool(f"--run={run_report / 'run'}", "--delta=1e-8", INTERNAL) == 0
    assert capsys.readouterr().out == (output / "statement.txt").read_text()


def test_the_statement_says_where_and_when_participation_was_at_its_worst(run_report):
    statement = " ".join((run_report / "out" / "statement.txt").read_text().split())
    assert (
        "Smallest separation: 6 rounds (observed), first from round 0 to round 6 "
        "(2024-01-01T00:00:00Z to 2024-01-01T00:06:30Z), 18 pairs in all." in statement
    )
    assert "Largest number of participations: 4 (observed), first from round 0" in statement
    assert f"Rounds completed: 24 (observed), with 24 contributions of {B} devices." in statement


# What is written.


def test_a_failure_while_writing_leaves_the_old_report(tmp_path, mechanism, capsys, monkeypatch):
    output = tmp_path / "out"
    limits = [f"--mechanism={mechanism}", "--max_participations=1", f"--output={output}"]
    assert run_tool(*limits) == 0
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    capsys.readouterr()
    rename = os.rename

    def fail(source, target):
        if Path(target) == output and Path(source).suffix == ".tmp":
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    refused(capsys, *limits, "--delta=1e-7")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mechanism.bandmf", "out"]
    monkeypatch.undo()
    assert run_tool(*limits, "--delta=1e-7") == 0
    assert json.loads((output / "report.json").read_text())["delta"] == 1e-7


@pytest.mark.parametrize("error", [ValueError, TypeError])
@pytest.mark.parametrize(
    "place",
    [
        "evidence.reader.mechanism_checksum",
        "evidence.logs.observed_participation",
        "report.document.analyze",
        "report.statement.opening",
        "report.page.render",
    ],
)
def test_a_bug_is_not_reported_as_a_guarantee_that_cannot_be_stated(
    tmp_path, mechanism, monkeypatch, place, error
):
    def planted(*_, **__):
        raise error("a planted bug")

    log = write_log(tmp_path)
    monkeypatch.setattr(f"bandmf_tf.{place}", planted)
    with pytest.raises(error, match="a planted bug"):
        run_tool(
            f"--mechanism={mechanism}", f"--participation={log}", f"--output={tmp_path / 'out'}"
        )
    assert not (tmp_path / "out").exists()


def test_nothing_identifies_a_client(run_report, log_report, tmp_path):
    ledger = (run_report / "run" / "ledger.jsonl").read_text()
    pseudonyms = set(re.findall(r'\["([0-9a-f]{32})"', ledger))
    assert len(pseudonyms) == B
    for path in (*(run_report / "out").iterdir(), *(log_report / "out").iterdir()):
        text = path.read_text()
        assert "secret-" not in text
        assert not any(pseudonym in text for pseudonym in pseudonyms)
        assert os.fspath(tmp_path.parent) not in text


SECTIONS = [
    "DP setting",
    "Data accesses covered",
    "hyperparameter tuning",
    "selection of a checkpoint",
    "Pre-training on public data",
    "Final mechanism output",
    "Unit of privacy",
    "Adjacency",
    "Type of accounting",
    "Assumptions",
    "Formal statement",
    "Transparency and verifiability",
    "Caveats",
    "floating point",
    "misbehaves",
]


def test_statements_have_every_section_and_the_figures(mechanism):
    report, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1))
    for text in (statement_text(report), statement_markdown(report)):
        plain = " ".join(text.split())
        for section in SECTIONS:
            assert section in plain, section
        assert f"{report.delta:g})-DP" in plain
        assert "1e-06" in plain
        norm = report.max_column_norm
        assert norm == pytest.approx(planned_mechanism().strategy.column_norms().max())
        unit = f"unit columns, its noise multiplier is {report.noise_multiplier / norm:.5g}"
        assert f"largest column norm of the strategy is {norm:.5g}" in plain
        assert unit in plain
    assert max(map(len, statement_text(report).splitlines())) <= 88


def test_figures_are_rounded_up(mechanism):
    report, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1))
    for value, shown in [(1.23401, "1.235"), (1.234, "1.234"), (0.99995, "1"), (123.41, "123.5")]:
        assert f"({shown}, 1e-06)-DP" in statement_text(dataclasses.replace(report, epsilon=value))


# The fields of records in OpenDP's registry (deployments-registry-data, 2026), which has no others;
# those that can be left out are marked by a question mark, and all are texts but those of `TYPES`.
REGISTRY = {
    "basic": "name data_curators intended_use data_product_type data_product_region description "
    "publication_date data_product_sector?",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details actors release_type release_type_details "
    "data_source_type? data_source_type_details? access_type access_type_details?",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources notes registry_authors",
}
NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1}
TYPES = {
    "data_curators": NAMES,
    "registry_authors": NAMES,
    "data_product_type": {"enum": ["Machine learning model"]},
    "data_product_sector": {"enum": list(SECTORS)},
    "publication_date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    "variant_name": {"enum": ["Approximate DP", "Zero-concentrated DP"]},
    "model_name": {"enum": ["Central"]},
    "release_type": {"enum": ["One release", "Many releases"]},
    "data_source_type": {"enum": ["Static", "Dynamic"]},
    "access_type": {"enum": ["Interactive", "Non-interactive"]},
    "privacy_parameters": {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"type": "number"} for name in ("epsilon", "delta", "rho")},
    },
}


def _registry_schema():
    """Returns the schema of a whole record, with the registry's names, types and choices."""

    def fields(names):
        known = {name.removesuffix("?"): name for name in names.split()}
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [name for name, marked in known.items() if name == marked],
            "properties": {name: TYPES.get(name, {"type": "string"}) for name in known},
        }

    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["url_slug", "status", "tier", "deployment"],
        "properties": {
            "url_slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
            "status": {"const": "Draft"},
            "tier": {"const": 3},
            "deployment": {
                "type": "object",
                "additionalProperties": False,
                "required": list(REGISTRY),
                "properties": {name: fields(names) for name, names in REGISTRY.items()},
            },
        },
    }


@pytest.mark.parametrize("facts", [None, FACTS], ids=["none", "all"])
def test_the_registry_entry_is_a_whole_record(tmp_path, mechanism, facts):
    path = None
    if facts is not None:
        path = tmp_path / "facts.yaml"
        path.write_text(facts)
    report, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1, facts=path))
    record = yaml.safe_load(registry_entry(report))
    jsonschema.validate(record, _registry_schema())
    assert ("<" in str(record)) == (facts is None)  # Nothing is asked that the facts have answered.
    entry = record["deployment"]
    if facts is not None:
        assert record["url_slug"] == "next-word-prediction-en-gb-example-ltd"
        assert entry["basic"]["data_curators"] == ["Example Ltd"]
        assert entry["basic"]["data_product_sector"] == "Technology"
        assert "12 runs on public text" in str(entry["implementation"])
    assert entry["privacy_loss"]["privacy_unit"] == "Client-level"
    assert entry["dp_variant"]["variant_name"] == "Zero-concentrated DP"
    assert isinstance(entry["basic"]["publication_date"], str)
    parameters = entry["privacy_loss"]["privacy_parameters"]
    assert parameters["delta"] == 1e-6
    assert report.epsilon <= parameters["epsilon"] <= report.epsilon * 1.002
    assert report.rho * (1 - 1e-12) <= parameters["rho"] <= report.rho * 1.002


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources, self.alternatives, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "img":
            self.sources.append(attributes["src"])
            self.alternatives.append(attributes["alt"])
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_has_all_pictures(run_report):
    text = (run_report / "out" / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert len(page.sources) == 5
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert all(page.alternatives)
    assert 'name="viewport"' in text
    assert "@media print" in text
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="no headless browser is installed")
def test_the_page_fits_a_phone_and_prints_in_a_real_browser(run_report, tmp_path):
    page = run_report / "out" / "report.html"
    # The page measures itself: no sideways scrolling, and every picture is decoded.
    script = (
        "<script>addEventListener('load', () => { const d = document.documentElement;"
        "document.title = [d.scrollWidth <= d.clientWidth, "
        "[...document.images].every(i => i.naturalWidth > 100), document.images.length].join(); "
        "});</script></body>"
    )
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text().replace("</body>", script))
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    dumped = subprocess.run(
        [*command, "--window-size=500,800", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert "<title>true,true,5</title>" in dumped
    pdf = tmp_path / "report.pdf"
    subprocess.run(
        [*command, f"--print-to-pdf={pdf}", page.as_uri()],
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert pdf.read_bytes().startswith(b"%PDF")


# What is assumed.


def test_what_is_assumed_is_never_shown_as_observed_or_enforced(tmp_path, mechanism, capsys):
    rounds = tmp_path / "rounds.csv"
    rows = "".join(f"{i},{60 * i},{60 * i + 30}\n" for i in range(24))
    rounds.write_text(f"round,start,end\n{rows}")
    output = tmp_path / "out"
    flags = [f"--mechanism={mechanism}", f"--participation={rounds}", "--timer_seconds=400"]
    assert run_tool(*flags, f"--output={output}") == 0
    capsys.readouterr()
    text = " ".join((output / "statement.txt").read_text().split())
    assert text.startswith("If no client took part in more than")
    assert "which is assumed, training for 24 rounds" in text
    assert "provided that no client" in text
    page = re.sub(r"base64,[A-Za-z0-9+/=]*", "", (output / "report.html").read_text())
    assert 'class="kept"' not in page
    assert '<p class="lead">If no client' in page
    assert "(enforced)" not in page
    assert "observed</th>" not in page
    assert run_tool(*flags, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    bases = {name: value for name, value in printed.items() if name.endswith("_basis")}
    assert bases == {
        "min_separation_basis": "assumed",
        "max_participations_basis": "assumed",
        "rounds_completed_basis": "observed",
        "noise_multiplier_basis": "assumed",
        "sampling_basis": None,
        "unit_basis": None,
        "timer_seconds_basis": "assumed",
    }
    assert printed["timer_seconds"] == 400
    assert any("No ledger or run record says" in note for note in printed["notes"])
    assert any("at least" in assumption for assumption in printed["assumptions"])


def test_a_timer_that_is_assumed_is_not_rounded(tmp_path, mechanism, capsys):
    rounds = tmp_path / "rounds.csv"
    rows = "".join(f"{i},{1000000 * i},{1000000 * i + 30}\n" for i in range(24))
    rounds.write_text(f"round,start,end\n{rows}")
    flags = [f"--mechanism={mechanism}", f"--participation={rounds}"]
    assert run_tool(*flags, "--timer_seconds=5000004.25") == 0
    assert "timer of 5000004.25 seconds" in " ".join(capsys.readouterr().out.split())


def test_every_assumption_is_in_the_first_sentence(tmp_path, mechanism):
    limits = {"mechanism": mechanism, "min_separation": B, "max_participations": K}
    report, _ = make_report(ReportRequest(**limits, rounds_completed=20, noise_multiplier=16.0))
    assert "took part in more than 4 rounds or in two less than 6" in opening(report)
    assert "training ended after 20 rounds" in opening(report)
    assert "was added, with noise multiplier 16" in opening(report)
    seen, _ = make_report(ReportRequest(run=make_run(tmp_path / "run")))
    assert opening(seen).startswith("Training for 24 rounds")
    assert "hold for what happened" in statement_text(seen)


def test_a_log_that_ends_early_only_assumes_that_training_did(tmp_path, mechanism):
    log = tmp_path / "log.csv"
    log.write_text("client,round\n" + "".join(f"c{i},{i}\n" for i in range(10)))
    report, _ = make_report(ReportRequest(mechanism=mechanism, participation=log))
    assert report.rounds_completed_basis == "assumed"
    assert opening(report).startswith("If training ended after 10 rounds and the noise")


# Editions.


def test_a_public_edition_singles_out_nobody(tmp_path, capsys):
    run = make_run(tmp_path / "run", liar=True, timer_seconds=330.0)
    output = tmp_path / "out"
    assert run_tool(f"--run={run}", f"--output={output}") == 0
    words = capsys.readouterr().out
    document = json.loads((output / "report.json").read_text())
    assert document["observed"] == {
        "source": "pseudonyms in the ledger",
        "num_units": None,
        "num_contributions": 24,
        "missing_rounds": 0,
        "closest": None,
        "most_active": None,
        "separations": {},
        "participations": {},
        "contributions_by_round": [],
        "separation_cells": [],
        "participation_cells": [],
    }
    assert document["well_behaved"]["violators"] is None
    assert document["well_behaved"]["num_units"] is None
    page = re.sub(r"base64,[A-Za-z0-9+/=]*", "", (output / "report.html").read_text())
    yaml_text = (output / "deployment.yaml").read_text()
    for text in (words, page, yaml_text, (output / "statement.md").read_text()):
        assert not re.search(r"\b1 (device|pair)", text)
        assert "first from round" not in text
        assert "first in round" not in text
    assert "Fewer than 20 devices did not keep to the timer" in " ".join(words.split())
    assert page.count("<img") == 3  # None of participation.
    assert run_tool(*verify(output / "report.json")) == 0
    report, _ = make_report(ReportRequest(run=run))
    assert report.observed.participations  # An internal edition has everything.
    assert report.epsilon == document["epsilon"]


@pytest.mark.parametrize(
    ("participations", "hidden"),
    [({1: 99, 4: 1}, True), ({3: 1, 4: 99}, True), ({4: 100}, False), ({1: 60, 4: 40}, False)],
)
def test_sums_in_a_public_edition_single_out_nobody(participations, hidden):
    """99 units once and one four times are 103 contributions of 100: the three are somebody's."""
    contributions = sum(k * units for k, units in participations.items())
    observed = document_module.Observed(
        source="a log",
        num_units=100,
        num_contributions=contributions,
        missing_rounds=0,
        closest=None,
        most_active=None,
        separations={6: contributions - 100},
        participations=participations,
        contributions_by_round=(contributions,),
    )
    public = observed.public(20)
    pairs = sum(cell.count for cell in public.separation_cells)
    assert pairs == (0 if hidden else contributions - 100)
    assert (public.num_contributions is None) == hidden
    assert (public.contributions_by_round == ()) == hidden


def test_small_cells_are_merged_and_nothing_is_lost():
    histogram = {5: 1, 6: 30, 7: 2, 9: 18, 40: 3, 90: 1}
    cells = document_module._cells(histogram, 20)
    assert [(cell.lowest, cell.count) for cell in cells] == [(5, 31), (7, 24)]
    assert document_module._cells({1: 3, 2: 4}, 20) == ()
    many = document_module._cells(histogram, 1)
    assert {cell.lowest: cell.count for cell in many} == histogram


def test_the_threshold_of_a_public_edition_can_be_stated(tmp_path, mechanism, capsys):
    output = tmp_path / "out"
    flags = [f"--mechanism={mechanism}", f"--participation={write_log(tmp_path)}"]
    assert run_tool(*flags, "--small_count=6", f"--output={output}") == 0
    observed = json.loads((output / "report.json").read_text())["observed"]
    assert observed["num_units"] == B
    assert observed["separation_cells"] == [{"lowest": B, "count": 18}]
    assert observed["participation_cells"] == [{"lowest": K, "count": B}]
    assert observed["closest"] is None
    assert (output / "report.html").read_text().count("<img") == 4
    capsys.readouterr()
    assert "small_count" in refused(capsys, *flags, "--small_count=0")
    # One would leave out nothing, and a report would be signed for the public with all of it.
    refusal = "small_count must be at least 2 in a public edition"
    assert refusal in refused(capsys, *flags, "--small_count=1")
    assert run_tool(*flags, "--small_count=1", "--edition=internal") == 0
    document = json.loads((output / "report.json").read_text())
    document["request"]["small_count"] = 1
    (output / "report.json").write_text(json.dumps(document))
    capsys.readouterr()
    assert refusal in refused(capsys, *verify(output / "report.json"))


# Names, digits and deltas.


def test_a_file_name_cannot_inject_markup(tmp_path, mechanism):
    name, folder = "a](x)`__b__\n# <b>c.csv", tmp_path / "round=7\n# <b>c"
    folder.mkdir()
    log = write_log(tmp_path).rename(folder / name)
    report, _ = make_report(ReportRequest(mechanism=mechanism, participation=log))
    text = statement_markdown(report)
    line = next(line for line in text.splitlines() if line.startswith("- participation log"))
    inside = line.partition("`")[2].partition("`")[0]
    assert re.fullmatch(r"[\w.%()+,=@ -]*", inside)
    assert line.count("`") == 2
    assert "# <b>c" not in text


def test_a_name_that_is_not_utf_8_gives_a_sentence(tmp_path, mechanism, capsys):
    log = os.fsencode(tmp_path) + b"/log\xff.csv"
    os.rename(write_log(tmp_path), log)
    for flags in (
        [f"--mechanism={mechanism}", f"--participation={os.fsdecode(log)}"],
        [f"--mechanism={os.fsdecode(log)}", "--max_participations=1"],
        [f"--mechanism={mechanism}", f"--participation={tmp_path}/log*"],
        [f"--run={os.fsdecode(log)}"],
    ):
        assert "UTF-8" in refused(capsys, *flags)
    refused(capsys, f"--verify={os.fsdecode(log)}")


def test_noise_is_never_shown_larger_than_it_was():
    for value, shown in [
        (0.44299999, 0.442999),
        (7.0, 7.0),
        (8.1234567, 8.12345),
        (123456.7, 123456),
    ]:
        assert round_down(value, 6) == shown
        assert round_down(value, 6) <= value


@pytest.mark.parametrize("delta", [0.001, 0.5, 0.999])
def test_a_large_delta_is_cautioned_about(mechanism, delta):
    report, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1, delta=delta))
    assert any("nothing at all is promised" in caution for caution in report.cautions)


# Verification.


def test_a_report_holds_and_says_how_much_was_checked(run_report, capsys):
    assert run_tool(*verify(run_report / "out" / "report.json")) == 0
    assert "holds" in capsys.readouterr().out


def test_a_report_is_read_as_it_was_written(run_report, log_report):
    for folder in (run_report, log_report):
        text = (folder / "out" / "report.json").read_text()
        report = read_report(folder / "out" / "report.json")
        assert dump(report.to_json()) + "\n" == text
        assert PrivacyReport.from_json(report.to_json()) == report


def test_a_report_can_be_verified_where_its_evidence_moved(log_report, capsys):
    path = log_report / "out" / "report.json"
    moved = (log_report / "mechanism.bandmf").rename(log_report / "moved.bandmf")
    assert "has no mechanism.bandmf" in refused(capsys, *verify(path), status=2)
    shutil.copytree(log_report / "out", log_report / "deeper" / "copy")
    (log_report / "log.csv").rename(log_report / "log2.csv")
    evidence = [f"--mechanism={moved}", f"--participation={log_report / 'log2.csv'}"]
    assert run_tool(*verify(log_report / "deeper" / "copy" / "report.json"), *evidence) == 0


def test_every_number_that_was_changed_is_found(log_report):
    path = log_report / "out" / "report.json"
    report = read_report(path)
    fresh, _ = make_report(report.request_in(path.parents[1]))
    fresh = dataclasses.replace(fresh, request=report.request).to_json()
    document = report.to_json()
    changed = 0
    for place in list(number_places(document)):
        forged = json.loads(json.dumps(document))
        parent = forged
        for name in place[:-1]:
            parent = parent[name]
        value = parent[place[-1]]
        parent[place[-1]] = value + 1 if isinstance(value, int) else value * 1.001
        with pytest.raises(ReportError, match=re.escape(str(place[0]))):
            document_module._compare(forged, fresh, "$")
        changed += 1
    assert changed > 80


def test_a_forged_report_is_refused_by_the_tool(log_report, capsys):
    path = log_report / "out" / "report.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "epsilon": document["epsilon"] / 2}))
    error = refused(capsys, *verify(path), status=1)
    assert "$.epsilon is" in error


@pytest.mark.parametrize("name", sorted(FILES - {"report.json"}))
def test_a_forged_statement_is_refused_by_the_tool(log_report, capsys, monkeypatch, name):
    # What a verification recomputes has tests of its own.
    monkeypatch.setattr("bandmf_tf.cli.report.verify_report", lambda *_: 1)
    path = log_report / "out" / "report.json"
    assert run_tool(*verify(path)) == 0
    capsys.readouterr()
    statement = log_report / "out" / name
    text = statement.read_bytes()
    for forged in (text.replace(b"zero-out", b"no"), text + b"\xff"):
        statement.write_bytes(forged)
        assert f"{name} does not say what" in refused(capsys, *verify(path), status=1)


def test_other_evidence_is_found(log_report, capsys):
    log = log_report / "log.csv"
    log.write_text(log.read_text().replace("secret-5,5\n", "secret-4,5\n"))
    path = log_report / "out" / "report.json"
    assert "does not hold" in refused(capsys, *verify(path), status=1)


def test_two_entries_of_one_name_are_refused(log_report, capsys):
    path = log_report / "out" / "report.json"
    text = path.read_text()
    path.write_text(text.replace('"epsilon":', '"epsilon": 0.01,\n  "epsilon":', 1))
    assert "two entries called 'epsilon'" in refused(capsys, *verify(path), status=2)


# What version 2 got before it was in any release.
UNRELEASED = ["comparison", "attacker", "min_column_norm", "replace_one", "facts", "open_questions"]


def test_reports_of_older_versions_still_verify(log_report, capsys):
    path = log_report / "out" / "report.json"
    document = json.loads(path.read_text())
    document["version"] = 1
    later = ("timer_seconds", "timer_seconds_basis", "failure_probability")
    for name in ("unit_basis", "examples_per_user", "audit", *later):  # Version 2 got them later.
        del document[name]
    del document["request"]["audit"]
    path.write_text(json.dumps({**document, "version": 2}))
    assert run_tool(*verify(path)) == 0
    for name in ("noise_multiplier_basis", "sampling_basis", "max_column_norm", *UNRELEASED):
        del document[name]
    for name in ("facts", "replace_one"):
        del document["request"][name]
    for name in ("released_sensitivity", "released_epsilon"):
        del document["tree_aggregation"][name]
    for name in ("separation_cells", "participation_cells"):
        del document["observed"][name]
    for name in ("further_participation", "fold_clients", "ledger_head", "edition", "small_count"):
        del document["request"][name]
    document["cautions"] = ["In the words of version 1."]
    document["epsilon"] *= 1.01  # A bound that has become sharper since.
    path.write_text(json.dumps(document))
    assert run_tool(*verify(path)) == 0
    assert "are not compared" in capsys.readouterr().out
    assert run_tool(*verify(path), "--json") == 0
    assert "are not compared" in capsys.readouterr().err
    for name, value in (
        ("epsilon", 0.5 * document["epsilon"]),
        ("rho", 0.9 * document["rho"]),
        ("min_separation", 2),
        ("epsilon_amplified", 0.01),
        ("l2_norm_clip", 5.0),
        ("groups", [{**group, "epsilon": 0.01} for group in document["groups"]]),
        ("curve", [{**point, "epsilon": 0.0} for point in document["curve"]]),
        ("planned", {**document["planned"], "epsilon": 0.01}),
    ):
        path.write_text(json.dumps({**document, name: value}))
        assert f"$.{name}" in refused(capsys, *verify(path), status=1)


def test_a_version_has_no_room_for_sentences(log_report, capsys):
    path = log_report / "out" / "report.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "library_version": "1.0, audited: epsilon 0.01"}))
    assert "$.library_version" in refused(capsys, *verify(path))
    document["mechanism"]["library_version"] = "9"
    path.write_text(json.dumps(document))
    assert "$.mechanism.library_version" in refused(capsys, *verify(path), status=1)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": 3}', "[" * 100_000])
def test_what_is_no_report_is_refused(tmp_path, capsys, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    refused(capsys, *verify(path))


def test_verification_takes_no_numbers(log_report, capsys):
    path = log_report / "out" / "report.json"
    assert "--delta" in refused(capsys, *verify(path), "--delta=1e-3")


def test_verify_report_is_what_the_tool_uses(mechanism):
    report, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1))
    assert verify_report(report, ReportRequest(mechanism=mechanism, max_participations=1)) > 50


def test_the_module_runs_from_a_checkout(mechanism):
    command = [sys.executable, "-m", "tools.privacy_report", f"--mechanism={mechanism}"]
    finished = subprocess.run(
        [*command, "--max_participations=1", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout).keys() >= KEYS


def test_a_reader_that_stops_reading_causes_no_traceback(mechanism):
    command = [sys.executable, "-m", "tools.privacy_report", f"--mechanism={mechanism}"]
    with subprocess.Popen(
        [*command, "--max_participations=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_help_names_every_flag(capsys):
    assert run_tool("--help") == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(ReportRequest):
        assert f"--{field.name.removeprefix('further_')}\n" in printed
    for flag in ("output", "verify", "json"):
        assert f"--{flag}\n" in printed


def test_every_file_names_what_the_bits_of_a_release_tell(run_report):
    """An attack on float32 releases is right every time; the guarantee is for real numbers."""
    for name in FILES - {"report.json"}:
        text = (run_report / "out" / name).read_text()
        words = " ".join(re.sub(r"\\(?=[-.])", "", text).split())
        assert "from the exact bits of released sums" in words
        assert "can tell with certainty whether a unit took part" in words
        assert "low-order" not in words


# Where the evidence was.


@pytest.mark.parametrize("edition", ["public", "internal"])
def test_nothing_in_a_report_tells_where_files_were(tmp_path, capsys, edition, monkeypatch):
    """Names of files are published with their digests; those of folders above them are not."""
    work = tmp_path / "home-of-alice" / "secret-project"
    facts = work / "folder-of-facts" / "facts.yaml"
    facts.parent.mkdir(parents=True)
    facts.write_text(FACTS)
    output = tmp_path / "our-site" / "out"
    flags = [f"--run={make_run(work / 'run', clock='real')}", f"--facts={facts}"]
    flags += [f"--participation={write_log(work)}", f"--edition={edition}"]
    assert run_tool(*flags, f"--output={output}") == 0
    words = capsys.readouterr().out.partition("\nWritten to ")[0]
    pages = [re.sub(r"base64,[A-Za-z0-9+/=]*", "", p.read_text()) for p in output.iterdir()]
    for text in (words, *pages):
        for name in ("alice", "secret-project", "folder-of-facts", "our-site", str(tmp_path)):
            assert name not in text
    request = json.loads((output / "report.json").read_text())["request"]
    assert (request["run"], request["facts"]) == ("run", "facts.yaml")
    assert request["participation"] == "log.csv"
    # Whoever has the evidence says where, by the flags that made the report or by its folder.
    assert run_tool(f"--verify={output / 'report.json'}", *flags[:3]) == 0
    shutil.copy(facts, work)
    assert run_tool(f"--verify={output / 'report.json'}", f"--evidence_root={work}") == 0
    capsys.readouterr()
    monkeypatch.chdir(work)
    assert run_tool("--run=run", f"--output={tmp_path / 'again'}") == 0
    again = json.loads((tmp_path / "again" / "report.json").read_text())
    assert again["request"]["run"] == "run"
    monkeypatch.chdir("run")
    report, _ = make_report(ReportRequest(run=Path(".")))
    assert report.request.run == Path("run")
