"""Audit records: what an audit attacked and what it found, as JSON for people and reports.

An audit (`audit/`) runs paths of the library with canaries and compares what was released with what
a mechanism claims. A record says which mechanism (by checksum) and how many of its rounds, each
path with its lower bound and its tests, and the verdict: "violates" if all tests together have a
p-value of at most `significance`, else "consistent". A reader computes both again.

Consistent means that this attack did not succeed. It proves nothing.

Compatibility. Fields are only ever added and their meanings never change; an added field raises the
version, and a reader refuses versions that it does not know.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

from bandmf_tf import _json, _provenance, schemas
from bandmf_tf._files import write_atomically
from bandmf_tf._numbers import exactly, round_down, round_up
from bandmf_tf.accounting.privacy_loss import gaussian_closed_epsilon
from bandmf_tf.errors import BandMFError
from bandmf_tf.runs import audit_errors
from bandmf_tf.runs.audit_errors import Errors

FORMAT = "bandmf_tf audit"
VERSION = 1
CONSISTENT, VIOLATES = "consistent", "violates"

_UNSEEN = "whose batches the adversary does not know"

# What is attacked on which path, in words; there are no others, so that no file can add its own.
ATTACKED = {
    "stream": "rows of a noise stream",
    "stream_restored": "a noise stream that was restored from a checkpoint",
    "stream_killed": "a noise stream whose program was killed, restored by another",
    "query": "a DP query with the noise in its state",
    "query_supplied": "a DP query with noise supplied by a stream",
    "query_adaptive": "a DP query whose clip norm adapts, with the votes that move it",
    "keras": "fit of a private Keras model",
    "keras_sampled": f"fit of a private Keras model, {_UNSEEN}",
    "keras_restored": "fit of a private Keras model that was restored",
    "keras_restored_sampled": f"fit of a private Keras model that was restored, {_UNSEEN}",
    "tff": "rounds of TFF with the noise in their state",
    "tff_supplied": "rounds of TFF with noise supplied by a stream",
    "batches": "the batches of a Keras pipeline",
    "model_black_box": "a classifier with many canaries in one run (black box)",
    "model_gradients": "a classifier with many canaries in one run (gradients)",
}

_ONE_RUN = "model_"

PROVES_NOTHING = (
    "An audit can only find faults: that this one found none proves nothing, and the guarantee "
    "rests on its proof and its assumptions as before."
)


class AuditRecordError(BandMFError):
    """A file is not a valid audit record."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One comparison with the claim.

    Attributes:
      name: What was compared.
      p_value: Of the claim, above 0.
      found: What was found, in a few words.
    """

    name: str
    p_value: float
    found: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedPath:
    """What was found on one path from data to releases.

    Attributes:
      name: Of the path, one of `ATTACKED`.
      trials: Trials that bounds were computed from; 0 if there are none.
      trials_with_canary: How many of them had the canary.
      mu_lower: Lower confidence bound on mu of Gaussian DP; None if there is none.
      epsilon_lower: Lower confidence bound on epsilon at the record's delta; None if there is none.
      tests: The comparisons.
    """

    name: str
    trials: int
    trials_with_canary: int
    mu_lower: float | None
    epsilon_lower: float | None
    tests: tuple[Comparison, ...]

    def __post_init__(self) -> None:
        if self.name not in ATTACKED:
            raise AuditRecordError(
                f"{self.name[:80]!r} is no path; they are {', '.join(ATTACKED)}."
            )

    @property
    def worst(self) -> Comparison:
        """The test with the smallest p-value."""
        return min(self.tests, key=lambda test: test.p_value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """What an audit found.

    Attributes:
      mechanism_checksum: Of the mechanism.
      num_rounds: Its rounds.
      rounds: How many of them, from the first, were done in the audit.
      delta: Delta of every epsilon here.
      claimed_mu: These rounds are claimed to be mu-GDP, without amplification.
      claimed_epsilon: And (epsilon, delta)-DP, amplified if the mechanism assumes sampling.
      claimed_epsilon_unamplified: Likewise, without amplification.
      confidence: Of every lower bound, each by itself.
      significance: The verdict is "violates" at p-values up to it.
      paths: What was attacked.
      created: When, UTC.
      library_version: By which version.
    """

    mechanism_checksum: str
    num_rounds: int
    rounds: int
    delta: float
    claimed_mu: float
    claimed_epsilon: float
    claimed_epsilon_unamplified: float
    confidence: float
    significance: float
    paths: tuple[AuditedPath, ...]
    created: str = dataclasses.field(default_factory=_provenance.now)
    library_version: str = dataclasses.field(default_factory=_provenance.version_of)

    @property
    def p_value(self) -> float:
        """Of the claim, all tests of all paths together (Bonferroni)."""
        p_values = [test.p_value for path in self.paths for test in path.tests]
        return min(1.0, len(p_values) * min(p_values))

    @property
    def verdict(self) -> str:
        """`CONSISTENT` or `VIOLATES`."""
        return VIOLATES if self.p_value <= self.significance else CONSISTENT

    def to_json(self) -> dict[str, Any]:
        """Returns the record as it is written."""
        fields = dataclasses.asdict(self)
        derived = {"p_value": self.p_value, "verdict": self.verdict}
        return json.loads(json.dumps({"format": FORMAT, "version": VERSION, **fields, **derived}))

    @classmethod
    def from_json(cls, value: Any) -> AuditRecord:
        """Returns the record that `to_json` has described; raises `AuditRecordError` otherwise."""
        error = schemas.find_error(value, f"audit-v{VERSION}")
        if error is not None:
            raise AuditRecordError(
                f"The audit is invalid at {error.json_path}: {error.message[:200]}."
            )
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {name: entry for name, entry in value.items() if name in names}
        fields["paths"] = tuple(
            AuditedPath(**{**path, "tests": tuple(Comparison(**test) for test in path["tests"])})
            for path in value["paths"]
        )
        record = cls(**fields)
        _provenance.check_time("created", record.created)
        stated = (value["verdict"], value["p_value"])
        same = math.isclose(stated[1], record.p_value, rel_tol=1e-9)
        if stated[0] != record.verdict or not same:
            raise AuditRecordError(
                f"The audit states the verdict {stated[0]!r} with p-value {stated[1]:g}, and its "
                f"tests give {record.verdict!r} with {record.p_value:g}."
            )
        record._check_numbers()
        return record

    def _check_numbers(self) -> None:
        """Raises AuditRecordError where numbers contradict each other."""
        if self.rounds > self.num_rounds:
            raise AuditRecordError(f"The audit is of {self.rounds} of {self.num_rounds} rounds.")
        if len({path.name for path in self.paths}) < len(self.paths):
            raise AuditRecordError("The audit has a path twice.")
        for path in self.paths:
            if path.trials_with_canary > path.trials:
                raise AuditRecordError(
                    f"The path {path.name} has {path.trials_with_canary} trials with a canary, of "
                    f"{path.trials} in all."
                )
            self._check_counts(path)
            bound, claim = path.epsilon_lower, self.claimed_epsilon
            if path.mu_lower is not None:
                bound, claim = path.mu_lower, self.claimed_mu
            # The p-value of a claim is the error probability with which the bound would reach it.
            surest = (1 - self.confidence) * (1 + 1e-6)
            if bound is not None and bound > claim and path.worst.p_value > surest:
                raise AuditRecordError(
                    f"The path {path.name} states a lower bound of {round_down(bound):g} for the "
                    f"claim {exactly(claim)}, and its tests, with p-values from "
                    f"{path.worst.p_value:.2g} on, do not."
                )

    def _check_counts(self, path: AuditedPath) -> None:
        """Raises AuditRecordError where bounds are not those of the errors that were counted."""
        counted = [(test, Errors.described(test.found)) for test in path.tests]
        # Of many canaries in one run there are scores instead, which no record holds.
        stated_epsilon = None if path.name.startswith(_ONE_RUN) else path.epsilon_lower
        bound = path.mu_lower or stated_epsilon
        if bound and not any(errors for _, errors in counted):
            raise AuditRecordError(
                f"The path {path.name} states a lower bound of {round_down(bound):g}, and no test "
                "counts the errors that it follows from."
            )
        for test, errors in counted:
            if errors is None:
                continue
            if test.name == "bound":
                mu = audit_errors.mu_lower_bound(errors, self.confidence)
                epsilon = audit_errors.epsilon_of_mu(mu, self.delta)
                p_value = audit_errors.mu_p_value(errors, self.claimed_mu)
            else:
                mu, claim = None, self.claimed_epsilon
                epsilon = audit_errors.epsilon_lower_bound(errors, self.delta, self.confidence)
                p_value = audit_errors.epsilon_p_value(errors, claim, self.delta)
            trials = errors.having + errors.without
            bounds = (path.mu_lower, path.epsilon_lower)
            stated = (path.trials_with_canary, path.trials, *bounds, test.p_value)
            found = (errors.having, trials, mu, epsilon, p_value)
            if not all(map(_agree, stated, found)):
                raise AuditRecordError(
                    f"The path {path.name} states {_numbers(stated)}, and the errors that it "
                    f"counts give {_numbers(found)}."
                )

    def sentences(self) -> list[str]:
        """Returns what was attacked, what was found and what it means, for statements."""
        rounds = f"{self.rounds}" if self.rounds == self.num_rounds else f"the first {self.rounds}"
        attacked = "; ".join(ATTACKED[path.name] for path in self.paths)
        first = (
            f"Canaries were sent through {rounds} of {self.num_rounds} rounds of the "
            f"mechanism ({attacked}), against an adversary who sees everything that is released "
            "and knows everything but whether one of them took part."
        )
        words = [first]
        bounds = [path for path in self.paths if path.mu_lower is not None]
        if bounds:
            best = max(bounds, key=lambda path: path.mu_lower or 0.0)
            claimed = gaussian_closed_epsilon(self.claimed_mu, self.delta)
            percent = round_down(100 * self.confidence)
            words.append(
                f"The attack shows, with {percent:g} % confidence for each path by "
                f"itself, a mu of at least {round_down(best.mu_lower or 0.0):g} where "
                f"{round_up(self.claimed_mu):g} is claimed, which is an epsilon of "
                f"{round_up(claimed):g} without amplification, at delta {self.delta!r} (path "
                f"{best.name})."
            )
        words.append(self._verdict_in_words())
        return words

    def _verdict_in_words(self) -> str:
        count = sum(len(path.tests) for path in self.paths)
        if self.verdict == CONSISTENT:
            return (
                f"Consistent: none of {count} tests contradicts the claim (p-value "
                f"{self.p_value:.2g}, {self.significance:g} would). {PROVES_NOTHING}"
            )
        path = min(self.paths, key=lambda path: path.worst.p_value)
        found = f" ({path.worst.found})" if path.worst.found else ""
        return (
            f"VIOLATES the claim: on the path {path.name}, {path.worst.name}{found}; if the claim "
            f"held, so much would be seen with probability {self.p_value:.2g} at most, all "
            f"{count} tests together."
        )


def _agree(stated: float | None, found: float | None) -> bool:
    if stated is None or found is None:
        return stated is found
    return math.isclose(stated, found, rel_tol=1e-4)


def _numbers(values: tuple[float | None, ...]) -> str:
    names = ("trials with a canary", "trials", "mu", "epsilon", "p-value")
    named = zip(names, values, strict=True)
    return ", ".join(f"{name} {exactly(value)}" for name, value in named if value is not None)


def save_audit_record(record: AuditRecord, path: str | os.PathLike[str]) -> None:
    """Writes the record to `path`, atomically and durably."""
    write_atomically(path, encode_audit_record(record))


def encode_audit_record(record: AuditRecord) -> bytes:
    """Returns the record as a file holds it."""
    return (json.dumps(record.to_json(), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def load_audit_record(path: str | os.PathLike[str]) -> AuditRecord:
    """Returns the record in a file.

    Raises:
      AuditRecordError: The file is not a valid audit record.
      OSError: The file cannot be read.
    """
    return _json.load(path, AuditRecord.from_json, AuditRecordError)
