"""Facts are compared with the evidence, what is missing is asked, and all files say the same."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser

import pytest
import yaml

from bandmf_tf._numbers import round_down, round_up
from bandmf_tf.accounting.gaussian import gaussian_epsilon
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.report import meaning, statement
from bandmf_tf.report.document import make_report
from bandmf_tf.report.facts import QUESTIONS
from bandmf_tf.runs.ledger import read_ledger
from cases import (
    FACTS,
    MODEL,
    B,
    K,
    keras_run,
    make_run,
    refused,
    run_tool,
)


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory):
    """A run by a real clock, whose program enforced more than what happened; do not touch."""
    return make_run(
        tmp_path_factory.mktemp("facts") / "run",
        clock="real",
        enforced_min_separation=B - 2,
        enforced_max_participations=K + 1,
    )


def _facts(tmp_path, **changes):
    """Writes facts that leave nothing open, but for changes."""
    facts = {**yaml.safe_load(FACTS), **changes}
    path = tmp_path / "facts.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in facts.items() if v is not ...}))
    return path


def _report(run, **request):
    return make_report(ReportRequest(run=run, **request))[0]


def _head(run):
    return read_ledger(run / "ledger.jsonl").head


# Facts and open questions.


def test_facts_are_merged_in_and_compared_with_the_evidence(run, tmp_path):
    digest = hashlib.sha256(MODEL).hexdigest()
    report = _report(run, facts=_facts(tmp_path, model_sha256=digest))
    agrees = {fact.name: fact.agrees_with for fact in report.facts}
    assert agrees["period"] == agrees["randomness"] == "the ledger"
    assert agrees["model_sha256"] == "the ledger, after round 24"
    assert {name for name, source in agrees.items() if source is None} == set(agrees) - {
        "period",
        "randomness",
        "model_sha256",
    }
    assert report.open_questions == ()
    text = " ".join(statement.statement_text(report).split())
    assert "Owner: Example Ltd (stated)" in text
    assert "Period: 2024-01-01 to 2024-01-01 (agrees with the ledger)" in text


def test_what_no_fact_answers_is_asked_and_never_guessed(run, tmp_path):
    assert len(_report(run).open_questions) == len(QUESTIONS)
    path = _facts(tmp_path, owner=..., contact=None, tuning=...)
    report = _report(run, facts=path)
    assert [question.partition(":")[0] for question in report.open_questions] == [
        "Owner",
        "Contact",
        "Tuning",
    ]
    text = " ".join(statement.statement_text(report).split())
    assert "Nobody has said - Owner: Who is responsible for it?" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"randomness": "a seed of our own"}, "drawn from the operating system"),
        ({"period": {"first": "2024-01-03", "last": "2024-01-03"}}, "from 2024-01-01 to"),
        ({"period": {"first": "2024-01-01", "last": "2024-06-01"}}, "from 2024-01-01 to"),
        ({"model_sha256": "0" * 64}, "no model of the ledger"),
        ({"period": "spring"}, "two dates"),
        ({"period": {"first": "2024-01-01"}}, "two dates"),
        ({"period": {"first": "2024-02-01", "last": "2024-01-01"}}, "before it begins"),
        ({"period": {"first": "1.1.2024", "last": "2024-01-01"}}, "a date such as"),
        ({"period": {"first": 20240101, "last": "2024-01-01"}}, "a date such as"),
        ({"code_commit": 1234567}, "put it in quotes"),
        ({"code_commit": "main"}, "hexadecimal digits"),
        ({"tuning": False}, "put it in quotes"),
        ({"owner": ["Example Ltd"]}, "put it in quotes"),
        ({"owner": " "}, "printable text"),
        ({"owner": "Example\u202e dtL"}, "printable text"),
        ({"owner": "x" * 601}, "printable text"),
        ({"sector": "Keyboards"}, "one of Technology"),
        ({"onwer": "Example Ltd"}, "unknown fields ['onwer']"),
    ],
)
def test_facts_that_are_wrong_or_contradict_the_evidence_are_refused(run, tmp_path, changes, words):
    path = _facts(tmp_path, **changes)
    with pytest.raises(ReportError, match=re.escape(words)) as error:
        _report(run, facts=path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- model",
        "model: [",
        "owner: a\nowner: b",
        "owner: &a [x]\nmodel: [*a, *a]",
        "<<: {owner: b}\nowner: a",
        "period: 2024-13-45",
        "owner: !!python/name:os.system",
        "owner: " + 3000 * "[",
    ],
)
def test_a_facts_file_that_is_none_gets_one_sentence(run, tmp_path, capsys, text):
    path = tmp_path / "facts.yaml"
    path.write_text(text)
    assert "facts.yaml" in refused(capsys, f"--run={run}", f"--facts={path}")


def test_a_facts_file_that_is_not_there_gets_one_sentence(run, tmp_path, capsys):
    for path in ("/nowhere.yaml", tmp_path):
        assert "cannot be read" in refused(capsys, f"--run={run}", f"--facts={path}")


def test_dates_of_people_may_be_a_day_off_and_simulated_clocks_tell_nothing(run, tmp_path):
    period = {"first": "2023-12-31", "last": "2024-01-02"}
    assert _report(run, facts=_facts(tmp_path, period=period)).facts[3].agrees_with == "the ledger"
    simulated = make_run(tmp_path / "simulated")
    period = {"first": "2026-01-01", "last": "2026-02-01"}
    report = _report(simulated, facts=_facts(tmp_path, period=period))
    assert report.facts[3].agrees_with is None


def test_there_is_no_secure_aggregation_of_examples(tmp_path):
    run = keras_run(tmp_path / "run")
    with pytest.raises(ReportError, match="there were no clients"):
        _report(run, facts=_facts(tmp_path, secure_aggregation=True, period=...))
    report = _report(run, facts=_facts(tmp_path, period=...))
    assert report.facts[-1].name == "author"


def test_a_fact_that_was_edited_later_is_noticed(run, tmp_path, capsys):
    path = _facts(tmp_path)
    output = tmp_path / "out"
    assert run_tool(f"--run={run}", f"--facts={path}", f"--output={output}") == 0
    flags = [f"--verify={output / 'report.json'}", f"--run={run}", f"--facts={path}"]
    assert run_tool(*flags) == 0
    capsys.readouterr()
    path.write_text(path.read_text().replace("Example Ltd", "Somebody Else"))
    message = refused(capsys, *flags, status=1)
    assert "Example Ltd" in message or "sha256" in message


def test_words_of_the_operator_are_no_markup(run, tmp_path):
    owner = "# <b>Evil</b> [x](http://y) **Ltd** `a` | _b_"
    report = _report(run, facts=_facts(tmp_path, owner=owner))
    markdown = statement.statement_markdown(report)
    assert owner not in markdown
    assert f"Owner: {owner} (stated)" in re.sub(r"\\(.)", r"\1", markdown)
    line = next(line for line in markdown.splitlines() if "Evil" in line)
    assert not re.search(r"(?<!\\)[<\[*`|_#]", line.removeprefix("- "))


# What was enforced, observed and planned.


def test_the_enforced_worst_case_stands_first(run):
    report = _report(run, ledger_head=_head(run))
    enforced, observed, planned = report.comparison
    assert [entry.kind for entry in report.comparison] == ["enforced", "observed", "planned"]
    assert (enforced.min_separation, enforced.max_participations) == (B - 2, K + 1)
    assert (observed.min_separation, observed.max_participations) == (B, K)
    assert observed.epsilon == report.epsilon
    assert enforced.epsilon > observed.epsilon
    limits = ReportRequest(
        mechanism=run / "mechanism.bandmf",
        participation=run / "ledger.jsonl",
        min_separation=B - 2,
        max_participations=K + 1,
    )
    assert enforced.epsilon == pytest.approx(make_report(limits)[0].epsilon)
    assert planned.epsilon == report.planned.epsilon
    cards = statement.headline_figures(report)
    assert cards[0][0] == f"{round_up(enforced.epsilon):g}"
    assert "enforced worst case" in cards[0][1]


def test_nothing_is_called_enforced_that_nothing_shows(run, tmp_path):
    for report in (
        _report(run),  # Compared with nothing.
        _report(make_run(tmp_path / "a")),  # No limit.
    ):
        first = report.comparison[0]
        assert (first.kind, first.epsilon) == ("enforced", None)
        assert "Enforced worst case: none" in statement.statement_text(report)
    broken = make_run(tmp_path / "b", enforced_min_separation=B + 1)
    assert _report(broken, ledger_head=_head(broken)).comparison[0].epsilon is None


def test_what_was_enforced_alone_is_stated_as_such(tmp_path):
    run = make_run(tmp_path / "run", pseudonymous=False, enforced_min_separation=B)
    report = _report(run, ledger_head=_head(run))
    enforced, observed, _ = report.comparison
    assert enforced.epsilon == report.epsilon
    assert observed.epsilon is None
    assert len(statement.headline_figures(report)) == 6  # Epsilon once.


# What epsilon and mu mean.


def test_the_success_of_an_attacker_is_that_of_the_best_test():
    """Of N(0, 1) and N(mu, 1) the best test is a threshold (Neyman and Pearson)."""
    mu, alpha = 1.3, 0.01
    threshold = 2.3263478740408408  # The normal quantile of 0.99.
    power = 0.5 * math.erfc((threshold - mu) / math.sqrt(2))
    found = meaning.attacker_success(mu, ())
    assert found.success == pytest.approx(power, rel=1e-12)
    assert found.bound == meaning.BY_MU
    assert meaning.gaussian_success(1e-9, alpha) == pytest.approx(alpha)


def test_the_bound_by_epsilon_is_never_below_the_gaussian_curve_it_follows_from():
    for mu in (0.1, 1.0, 3.0, 8.0):
        points = [(d, gaussian_epsilon(1.0, mu, d)) for d in (1e-9, 1e-6, 1e-4, 1e-3, 1e-2)]
        bounds = [meaning.approximate_success(e, d, 0.01) for d, e in points]
        success = meaning.gaussian_success(mu, 0.01)
        assert min(bounds) >= success
        assert min(bounds) <= min(1.0, 3 * success)  # And not by far.
    assert meaning.approximate_success(0.0, 0.0, 0.01) == pytest.approx(0.01)
    assert meaning.approximate_success(1e4, 1e-6, 0.01) == 1.0


@pytest.mark.parametrize("false_alarms", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("delta", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0, 6.0])
def test_the_bound_by_epsilon_is_what_the_best_test_reaches(epsilon, delta, false_alarms):
    """Randomised response that fails with probability delta; outcomes by falling likelihood."""
    factor = math.exp(epsilon)
    answers = [(1 - delta) * factor / (1 + factor), (1 - delta) / (1 + factor)]
    power, left = delta, false_alarms
    for used, unused in zip(answers, answers[::-1], strict=True):
        share = min(1.0, left / unused)
        power, left = power + share * used, left - share * unused
    found = meaning.approximate_success(epsilon, delta, false_alarms)
    assert found == pytest.approx(power, rel=1e-12)


def test_the_smaller_bound_is_stated_and_named():
    found = meaning.attacker_success(3.0, [(1e-6, 0.5), (1e-3, 0.2)])
    assert found.bound == meaning.BY_EPSILON
    assert found.success == pytest.approx(math.exp(0.2) * 0.01 + 1e-3)
    assert meaning.attacker_success(0.01, [(1e-6, 9.0)]).bound == meaning.BY_MU


def test_an_amplified_report_says_which_bound_it_is(tmp_path):
    report = _report(keras_run(tmp_path / "run"))
    assert report.is_amplified
    text = " ".join(statement.statement_text(report).split())
    assert f"by {report.attacker.bound}" in text
    assert report.attacker.success <= meaning.gaussian_success(report.mu, 0.01)


def test_an_epsilon_that_limits_nothing_is_called_so(run):
    text = statement.statement_text(dataclasses.replace(_report(run), epsilon=800.0))
    assert "which limits nothing" in " ".join(text.split())


# Figures that can be computed again by hand.


def test_published_figures_follow_by_hand(run):
    report = _report(run)
    text = " ".join(statement.statement_text(report).split())
    found = re.search(
        r"noise multiplier = ([\d.]+) / ([\d.]+) = ([\d.]+), and rho = mu\^2 / 2 = ([\d.]+);", text
    )
    sensitivity, noise, mu, rho = map(float, found.groups())
    assert mu == pytest.approx(sensitivity / noise, rel=2e-4)
    assert mu >= sensitivity / noise
    assert rho == pytest.approx(mu**2 / 2, rel=4e-4)
    assert mu >= report.mu
    assert rho >= report.rho
    found = re.search(
        r"norms from ([\d.]+) to ([\d.]+), .* is at most ([\d.]+) times the square root of (\d+), "
        r"which is ([\d.]+)\.",
        text,
    )
    smallest, largest, again, k, bound = map(float, found.groups())
    norms = report.min_column_norm, report.max_column_norm
    assert smallest * (1 - 1e-12) <= norms[0] <= norms[1] <= largest * (1 + 1e-12)
    assert largest == again
    assert bound >= largest * math.sqrt(k) * (1 - 1e-12)
    assert bound >= report.sensitivity


def test_replace_one_is_stated_on_request_and_is_twice_as_sensitive(run):
    assert _report(run).replace_one is None
    report = _report(run, replace_one=True)
    assert report.replace_one.mu == 2 * report.mu
    assert report.replace_one.rho == pytest.approx(4 * report.rho)
    assert report.replace_one.epsilon == pytest.approx(
        gaussian_epsilon(report.noise_multiplier, 2 * report.sensitivity, report.delta)
    )
    assert "For replace-one neighbours" in statement.statement_text(report)


def test_a_ledger_tells_that_the_clip_norm_followed_a_quantile(tmp_path):
    settings = {"target_quantile": 0.4, "learning_rate": 0.2, "vote_weight": 0.1}
    report = _report(make_run(tmp_path / "run", adaptive_clipping=settings))
    text = " ".join(statement.statement_text(report).split())
    assert "adaptive clip norm, starting at" in text
    assert "a quantile of the norms of updates (target_quantile=0.4)" in text
    assert report.to_json()["clip_norm_adapts"] is True


# All editions say the same.


class _Words(HTMLParser):
    """The words of the sections of a page, from its second `h2` on."""

    def __init__(self):
        super().__init__()
        self.words, self.sections, self._skip = [], 0, 0

    def handle_starttag(self, tag, attrs):
        self.sections += tag == "h2"
        self._skip += tag in ("style", "footer")

    def handle_endtag(self, tag):
        self._skip -= tag in ("style", "footer")

    def handle_data(self, data):
        if self.sections > 1 and not self._skip:
            self.words += data.split()


def _plain(words):
    """Returns words without the signs by which editions mark titles and lists."""
    found = (re.sub(r"^\d\.$|^-$|[:.]$", "", word) for word in words)
    return [word for word in found if word]


@pytest.mark.parametrize("kind", ["ledger", "record"])
def test_text_markdown_page_and_json_agree_word_by_word(run, tmp_path, kind):
    if kind == "ledger":
        flags = [f"--run={run}", f"--facts={_facts(tmp_path)}", f"--ledger_head={_head(run)}"]
    else:
        flags = [f"--run={keras_run(tmp_path / 'run')}"]
    output = tmp_path / "out"
    assert run_tool(*flags, "--replace_one", f"--output={output}") == 0
    text = (output / "statement.txt").read_text()
    markdown = (output / "statement.md").read_text()
    page = _Words()
    page.feed((output / "report.html").read_text())
    sections = text[text.index("\n1. DP setting") :]
    unmarked = re.sub(r"^#+ |\*\*", "", markdown[markdown.index("\n## 1.") :], flags=re.M)
    unmarked = re.sub(r"\\(.)", r"\1", unmarked)
    assert _plain(sections.split()) == _plain(unmarked.split()) == _plain(page.words)
    # The figures before the sections.
    before = text[: text.index("\n1. DP setting")].split()
    unmarked = re.sub(r"^# Privacy statement$|\|( --- \|)*", "", markdown, flags=re.M)
    assert _plain(before) == _plain(unmarked[: unmarked.index("\n## 1.")].split())
    # What JSON has in sentences stands in the words, and its figures are rounded up.
    document, words = json.loads((output / "report.json").read_text()), " ".join(text.split())
    sentences = [*document["assumptions"], *document["findings"], *document["cautions"]]
    sentences += [*document["evidence"]["notes"], *document["open_questions"]]
    sentences += [fact["value"] for fact in document["facts"]]
    for sentence in sentences:
        assert " ".join(sentence.split()) in words
    for name in ("epsilon", "epsilon_unamplified", "epsilon_zcdp", "rho", "mu"):
        assert f"{round_up(document[name]):g}" in words
    for entry in document["comparison"]:
        if entry["epsilon"] is not None:
            assert f"epsilon {round_up(entry['epsilon']):g}, rho" in words
    assert f"noise multiplier {round_down(document['noise_multiplier'], 6):g}" in words
    assert html.unescape(text) == text
