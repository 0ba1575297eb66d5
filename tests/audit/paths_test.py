"""The audit in its small form, on every path: consistent, below the claim, and not far below."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from bandmf_tf.accounting import (
    BallsInBins,
    BoundedPoissonSampling,
    FixedSizeSampling,
    MinSeparationSampling,
    OncePerEpoch,
    PoissonSampling,
    SecretParts,
)
from bandmf_tf.audit import program, statistics
from bandmf_tf.audit.attack import Canaries, Target, attack, worst_pattern
from bandmf_tf.audit.figures import audit_picture
from bandmf_tf.audit.paths import PATHS, audit, available_paths, default_size
from bandmf_tf.audit.sampling import sampling_tests
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, SingleParticipation
from bandmf_tf.factorization.strategies import ToeplitzStrategy, identity
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.mechanisms.files import mechanism_checksum, save_mechanism
from bandmf_tf.runs.audit_record import (
    CONSISTENT,
    VIOLATES,
    AuditRecord,
    AuditRecordError,
    load_audit_record,
    save_audit_record,
)
from cases import make_mechanism, random_banded, separated_patterns
from noise_cases import pin_entropy

ROUNDS, SEPARATION = 12, 4
STRATEGY = ToeplitzStrategy(np.array([1.0, 0.5, 0.25, 0.2]), ROUNDS).to_banded()
MECHANISM = make_mechanism(STRATEGY, MinSeparation(SEPARATION), noise_multiplier=1.2)
SAMPLED = make_mechanism(
    STRATEGY, sampling=PoissonSampling(ROUNDS, SEPARATION, 0.5), noise_multiplier=1.2
)

# So seldom that nobody sees it: noise of a process that is killed is the system's.
SURE = 1 - 1e-7


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch):
    pin_entropy(monkeypatch)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "stream_killed"])
def test_on_every_path_the_bound_is_below_the_claim_and_within_a_tenth(path):
    if path not in available_paths():
        pytest.skip("This stack has no tensorflow_federated.")
    record, _ = audit(MECHANISM, paths=[path], seed=1)
    assert record.verdict == CONSISTENT
    for found in record.paths:
        if found.mu_lower is not None:
            assert 0.9 * record.claimed_mu < found.mu_lower < record.claimed_mu
        if found.epsilon_lower is not None:
            assert found.epsilon_lower < record.claimed_epsilon


def test_where_few_canaries_are_exposed_there_are_more_of_them():
    """Who comes first meets the largest columns; an eighth of all are drawn in each of 3 visits."""
    strategy = ToeplitzStrategy(1 / np.sqrt(np.arange(1, ROUNDS + 1)), ROUNDS)
    mechanism = make_mechanism(strategy, MinSeparation(SEPARATION), noise_multiplier=2.0)
    record, _ = audit(mechanism, paths=["keras"], seed=1)
    assert record.verdict == CONSISTENT
    assert 0.9 * record.claimed_mu < record.paths[0].mu_lower < record.claimed_mu
    plain, sampled = (
        default_size(Target(one, ROUNDS), "keras", 0.95) for one in (MECHANISM, SAMPLED)
    )
    assert sampled[1] > 7 * plain[1]


@pytest.mark.parametrize("noise_multiplier", [0.25, 1.0, 8.0])
def test_small_and_large_claims_have_the_trials_that_they_need(noise_multiplier):
    mechanism = make_mechanism(
        STRATEGY, MinSeparation(SEPARATION), noise_multiplier=noise_multiplier
    )
    target = Target(mechanism, ROUNDS)
    mu = target.claimed_mu
    needed = statistics.trials_for(mu, 0.9 * mu, 0.95, 1 << 20)
    for path in ("stream", "stream_killed", "query", "tff"):
        runs, coordinates = default_size(target, path, 0.95)
        assert runs * coordinates > 0.9 * needed
        assert runs <= 192


def test_after_a_kill_the_library_keeps_what_it_claims():
    record, attacks = audit(
        MECHANISM, paths=["stream_killed"], coordinates=4_096, confidence=SURE, seed=1
    )
    assert record.verdict == CONSISTENT
    assert record.paths[0].mu_lower < record.claimed_mu
    assert attacks["stream_killed"].mu_lower(0.95) > 0.75 * record.claimed_mu


def test_a_sampled_run_that_is_restored_keeps_what_it_claims():
    record, _ = audit(SAMPLED, paths=["keras_restored"], coordinates=1_024, confidence=SURE)
    plain, sampled = record.paths
    assert record.verdict == CONSISTENT
    assert record.claimed_epsilon < record.claimed_epsilon_unamplified
    assert plain.mu_lower < record.claimed_mu
    assert sampled.epsilon_lower < record.claimed_epsilon
    value = record.to_json()
    assert AuditRecord.from_json(value) == record
    value["paths"][1]["epsilon_lower"] += 0.01
    with pytest.raises(AuditRecordError, match="keras_restored_sampled states"):
        AuditRecord.from_json(value)


DRAWN = (
    # With 240 at most, one test in twenty could not tell them apart; with 230, none of 20,000.
    (BoundedPoissonSampling(ROUNDS, 4, 0.5, 230, 2_000), PoissonSampling(ROUNDS, 4, 0.5)),
    (BallsInBins(ROUNDS, 4), SecretParts(ROUNDS, 4, 0.9)),
    (SecretParts(ROUNDS, 4, 0.5), MinSeparationSampling(ROUNDS, 4, 0.5)),
    (MinSeparationSampling(ROUNDS, 4, 0.3), SecretParts(ROUNDS, 4, 0.3)),
    (OncePerEpoch(ROUNDS, 4, 8), MinSeparationSampling(ROUNDS, 4, 0.2)),
    (MinSeparationSampling(ROUNDS, 4, 0.2), OncePerEpoch(ROUNDS, 4, 8)),
)


@pytest.mark.parametrize(("scheme", "other"), DRAWN, ids=lambda scheme: scheme.kind)
def test_batches_are_those_of_their_scheme_and_of_no_other(scheme, other):
    from bandmf_tf.audit.keras_paths import drawn_batches

    target = Target(make_mechanism(STRATEGY, sampling=scheme, noise_multiplier=1.2), ROUNDS)
    runs = [drawn_batches(target, 2_000) for _ in range(2)]

    def p_values(claimed):
        return [
            test.p_value for test in sampling_tests(claimed, claimed.participation, 2_000, runs)
        ]

    assert min(p_values(scheme)) > 1e-7
    assert min(p_values(other)) < 1e-7


@pytest.mark.parametrize(
    "strategy",
    [
        BufferedStrategy(np.array([0.9, 0.5]), np.array([0.2, 0.1]), ROUNDS),
        TreeStrategy(ROUNDS),
    ],
    ids=lambda strategy: strategy.kind,
)
def test_every_kind_of_strategy_can_be_audited_and_the_bound_is_tight(strategy):
    mechanism = make_mechanism(strategy, MinSeparation(4), noise_multiplier=1.0)
    record, _ = audit(mechanism, paths=["stream"], coordinates=8_192, confidence=SURE)
    assert record.verdict == CONSISTENT
    assert record.paths[0].mu_lower > 0.8 * record.claimed_mu


class TestPattern:
    """The attack does not take the mechanism's word for the worst pattern."""

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("bands", [3, 6])
    def test_the_worst_pattern_is_that_of_brute_force(self, seed, bands):
        n, b, k = 9, 3, 3
        strategy = random_banded(bands, n, seed, spread=0.5)
        strategy = type(strategy)(np.abs(strategy.bands))
        found = np.linalg.norm(strategy.matmul(worst_pattern(strategy, MinSeparation(b, k))))
        C = strategy.materialize()
        best = max(
            np.linalg.norm(C[:, list(rounds)].sum(axis=1)) for rounds in separated_patterns(n, b, k)
        )
        assert found == pytest.approx(best)

    @pytest.mark.parametrize(
        "participation", [SingleParticipation(), FixedEpochs(4, 2), MinSeparation(5, 2)]
    )
    def test_it_is_allowed_and_attains_the_sensitivity(self, participation):
        strategy = random_banded(4, ROUNDS, 3)
        pattern = worst_pattern(strategy, participation)
        gaps = np.diff(np.flatnonzero(pattern))
        assert np.abs(pattern).sum() <= participation.most(ROUNDS)
        assert np.all(gaps >= participation.separation(ROUNDS))
        attained = np.linalg.norm(strategy.matmul(pattern))
        assert attained == pytest.approx(participation.sensitivity(strategy).value)

    def test_the_first_rounds_have_a_claim_of_their_own(self):
        half = Target(MECHANISM, 6)
        assert half.claimed_mu < Target(MECHANISM, ROUNDS).claimed_mu
        exposure = np.linalg.norm(half.strategy.matmul(half.pattern)) / 1.2
        assert exposure == pytest.approx(half.claimed_mu)
        record, _ = audit(MECHANISM, paths=["stream"], rounds=6, coordinates=1_024)
        assert (record.rounds, record.num_rounds) == (6, ROUNDS)
        assert record.verdict == CONSISTENT
        assert "the first 6 of 12 rounds" in record.sentences()[0]


class TestSampling:
    """What cannot happen under a scheme refutes it at once."""

    SCHEME = FixedSizeSampling(8, 2, 5, 40)

    def _runs(self, change=None):
        rng = np.random.default_rng(3)
        runs = []
        for _ in range(2):
            parts = rng.permutation(40).reshape(2, 20)
            runs.append([rng.choice(parts[i % 2], 5, replace=False) for i in range(8)])
        if change is not None:
            change(runs[0])
        return sampling_tests(self.SCHEME, self.SCHEME.participation, 40, runs)

    def test_a_right_scheme_passes(self):
        assert min(test.p_value for test in self._runs()) > 1e-3

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda run: run.__setitem__(3, run[2]), "again after 1 rounds"),
            (lambda run: run.__setitem__(3, np.r_[run[3][:4], run[3][0]]), "twice in the batch"),
            (lambda run: run.__setitem__(3, run[3][:4]), "4 examples for 5"),
            (lambda run: run.__setitem__(5, run[2]), "again after"),
        ],
    )
    def test_what_is_excluded_is_found(self, change, words):
        worst = min(self._runs(change), key=lambda test: test.p_value)
        assert worst.p_value < 1e-100
        assert words in worst.found


class TestRecord:
    @pytest.fixture(name="record", scope="class")
    def _record(self):
        return audit(MECHANISM, paths=["stream"], coordinates=256, seed=3)

    def test_a_record_is_read_as_it_was_written(self, record, tmp_path):
        save_audit_record(record[0], tmp_path / "audit.json")
        assert load_audit_record(tmp_path / "audit.json") == record[0]
        assert record[0].mechanism_checksum == mechanism_checksum(MECHANISM)

    def test_words_say_what_was_attacked_and_that_it_proves_nothing(self, record):
        words = " ".join(record[0].sentences())
        for expected in ("rows of a noise stream", "95 % confidence", "proves nothing"):
            assert expected in words

    @pytest.mark.parametrize(
        "change",
        [
            {"verdict": VIOLATES},
            {"p_value": 1e-9},
            {"version": 2},
            {"paths": []},
            {"extra": 1},
            {"created": "yesterday"},
            {"claimed_mu": -1.0},
            {"rounds": ROUNDS + 1},
            {"significance": 1e-30},
            {"claimed_mu": 0.1},
        ],
    )
    def test_a_record_that_was_edited_or_is_of_another_version_is_refused(
        self, record, tmp_path, change
    ):
        path = tmp_path / "audit.json"
        path.write_text(json.dumps({**record[0].to_json(), **change}))
        with pytest.raises(AuditRecordError):
            load_audit_record(path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"mu_lower": 99.0}, "mu 99, "),
            ({"mu_lower": None, "epsilon_lower": 99.0}, "epsilon 99, .* and the errors"),
            ({"mu_lower": 0.1}, "states .* mu 0.1, .* errors that it counts give .* mu "),
            ({"epsilon_lower": 0.01}, "epsilon 0.01, .* and the errors"),
            ({"mu_lower": None}, "the errors that it counts give"),
            ({"trials": 10**6}, "trials 1000000, .* and the errors"),
            ({"trials_with_canary": 10**6}, "1000000 trials with a canary, of"),
            ({"name": "tff"}, "has a path twice"),
        ],
    )
    def test_a_path_whose_numbers_contradict_each_other_is_refused(self, record, change, words):
        value = record[0].to_json()
        value["paths"] = [{**value["paths"][0], **change}]
        if "name" in change:
            value["paths"] *= 2
            value["p_value"] = min(1.0, 2 * value["p_value"])
        with pytest.raises(AuditRecordError, match=words):
            AuditRecord.from_json(value)

    @pytest.mark.parametrize("name", ["stream", "model_gradients"])
    def test_a_bound_whose_errors_nobody_counted_is_refused(self, record, name):
        value = record[0].to_json()
        (path,) = value["paths"]
        tests = [{**test, "found": ""} for test in path["tests"]]
        path |= {"name": name, "mu_lower": 0.9 * value["claimed_mu"], "tests": tests}
        with pytest.raises(AuditRecordError, match="no test counts the errors"):
            AuditRecord.from_json(value)

    def test_a_confidence_is_never_rounded_up(self, record):
        sure = dataclasses.replace(record[0], confidence=1 - 1e-7)
        assert "with 99.99 % confidence" in sure.sentences()[1]

    @pytest.mark.parametrize("text", ["", "[]", "{", "nested", '{"p_value": NaN}'])
    def test_what_is_no_record_is_refused(self, tmp_path, text):
        (tmp_path / "audit.json").write_text("[" * 100_000 if text == "nested" else text)
        with pytest.raises(AuditRecordError, match=r"audit\.json: "):
            load_audit_record(tmp_path / "audit.json")

    def test_a_violation_names_what_was_found(self, record):
        value = record[0].to_json()
        value["paths"][0]["tests"][0]["p_value"] = 1e-12
        count = len(value["paths"][0]["tests"])
        value |= {"verdict": VIOLATES, "p_value": count * 1e-12}
        words = AuditRecord.from_json(value).sentences()[-1]
        assert words.startswith("VIOLATES the claim: on the path stream, size of kernel")

    def test_the_picture_is_drawn_from_scores(self, record):
        assert audit_picture(*record).startswith(b"\x89PNG")
        without = AuditRecord.from_json(record[0].to_json())
        path = without.paths[0]
        object.__setattr__(path, "mu_lower", None)
        assert audit_picture(without, record[1]) is None


def test_releases_that_are_not_numbers_violate():
    target = Target(MECHANISM, ROUNDS)
    canaries = Canaries.draw(target, 64, np.random.default_rng(0))
    found = attack(target, [canaries.observed(np.full((ROUNDS, 64), np.nan))])
    assert found.tests[0].p_value < 1e-100


def _tool(capsys, *arguments):
    status = program.main(["bandmf-audit", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


class TestProgram:
    def test_it_writes_a_record_and_a_picture(self, capsys, tmp_path):
        save_mechanism(MECHANISM, tmp_path / "m.bandmf")
        flags = [f"--mechanism={tmp_path / 'm.bandmf'}", "--paths=stream", "--coordinates=512"]
        status, out, _ = _tool(capsys, *flags, f"--output={tmp_path / 'audit'}")
        assert status == 0
        assert "proves nothing" in out.replace("\n", " ")
        assert {p.name for p in (tmp_path / "audit").iterdir()} == {"audit.json", "audit.png"}
        record = load_audit_record(tmp_path / "audit" / "audit.json")
        assert record.mechanism_checksum == mechanism_checksum(MECHANISM)

    def test_a_violation_is_exit_status_1(self, capsys, monkeypatch):
        def broken(canaries):
            return canaries.observed(0.5 * canaries.sums())

        monkeypatch.setattr("bandmf_tf.audit.noise_paths.stream", broken)
        monkeypatch.setattr(program, "_own_mechanism", lambda: MECHANISM)
        status, out, _ = _tool(capsys, "--paths=stream", "--coordinates=512", "--json")
        assert status == 1
        assert json.loads(out)["verdict"] == VIOLATES

    @pytest.mark.parametrize(
        ("flag", "words"),
        [
            ("--paths=stream,nothing", "paths must be some of"),
            ("--rounds=25", "at most the mechanism's num_rounds=12"),
            ("--rounds=0", "rounds must be at least 1"),
            ("--coordinates=3", "coordinates must be at least 64"),
            ("--confidence=1", "confidence must be strictly between 0 and 1"),
            ("--mechanism=/nowhere", "No such file"),
            ("--output=", "output must be a folder"),
        ],
    )
    def test_what_cannot_be_done_is_said_in_a_sentence(self, capsys, monkeypatch, flag, words):
        monkeypatch.setattr(program, "_own_mechanism", lambda: MECHANISM)
        status, out, err = _tool(capsys, flag)
        assert (status, out) == (2, "")
        assert words in err
        assert "Traceback" not in err

    def test_a_mechanism_that_is_too_long_is_refused(self):
        long = make_mechanism(identity(5_000), SingleParticipation())
        with pytest.raises(BandMFError, match="at most 2500 rounds"):
            audit(long, paths=["stream"])
