"""An audit: the paths that can be attacked, and what attacking them found.

Paths are named here and imported when they are asked for, because they need TensorFlow and, two of
them, TensorFlow Federated.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence

import numpy as np

from bandmf_tf import _checks, _extras
from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.audit import statistics
from bandmf_tf.audit.attack import (
    MOST_ROUNDS,
    SIGNIFICANCE,
    Attack,
    AuditError,
    Canaries,
    Target,
    attack,
    sampled_attack,
)
from bandmf_tf.audit.sampling import sampling_tests
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs import audit_errors
from bandmf_tf.runs.audit_record import AuditedPath, AuditRecord, Comparison

_NOISE, _KERAS = "bandmf_tf.audit.noise_paths", "bandmf_tf.audit.keras_paths"
_FEDERATED = "bandmf_tf.audit.federated_paths"

# The bound is to come so close to the claim, nearly always, unless coordinates are asked for.
_TIGHT = 0.9

# Trials of a path; runs of one, and values in all its rounds and trials, which take time and room.
_FEWEST_TRIALS, _MOST_TRIALS = 8_192, 1 << 20
_MOST_RUNS, _MOST_VALUES = 192, 1 << 27

# Canaries of the classifier, and examples of the pipeline, at most.
_MOST_EXAMPLES = 4_096


@dataclasses.dataclass(frozen=True)
class _CanaryPath:
    """A path that canaries of one coordinate each go through.

    Attributes:
      module: Where its function is.
      function: Which makes an observation from canaries or, in Keras, from their number.
      runs: How often it is run, at least: twice where two runs must not share noise.
      wide: Coordinates of a run, at most, as long as there may be more runs. Where each canary is a
        record or a client with a whole update, many narrow runs take less time than one wide one.
    """

    module: str
    function: str
    runs: int = 1
    wide: int = 1 << 17


_CANARY_PATHS = {
    "stream": _CanaryPath(_NOISE, "stream", 2),
    "stream_restored": _CanaryPath(_NOISE, "restored_stream"),
    "stream_killed": _CanaryPath(_NOISE, "killed_stream"),
    "query": _CanaryPath(_NOISE, "state_query", 2, 1 << 14),
    "query_supplied": _CanaryPath(_NOISE, "supplied_query", 2, 1 << 14),
    "query_adaptive": _CanaryPath(_NOISE, "adaptive_query", 2, 1 << 14),
    "keras": _CanaryPath(_KERAS, "fitted"),
    "keras_restored": _CanaryPath(_KERAS, "restored_fit"),
    "tff": _CanaryPath(_FEDERATED, "state_factory", 1, 1 << 11),
    "tff_supplied": _CanaryPath(_FEDERATED, "stream_factory", 1, 1 << 11),
}
_BATCHES, _MODEL = "batches", "model"

PATHS = (*_CANARY_PATHS, _BATCHES, _MODEL)
"""What can be attacked, by name."""


def available_paths() -> tuple[str, ...]:
    """Returns the paths that can be attacked with what is installed."""
    if importlib.util.find_spec("tensorflow_federated") is not None:
        return PATHS
    return tuple(path for path in PATHS if not path.startswith("tff"))


def audit(
    mechanism: Mechanism,
    *,
    paths: Sequence[str] | None = None,
    rounds: int | None = None,
    coordinates: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[AuditRecord, dict[str, Attack]]:
    """Attacks paths of the library with a mechanism and compares them with its claims.

    Args:
      mechanism: The mechanism.
      paths: Some of `PATHS`; None for all that are installed.
      rounds: How many rounds of the mechanism to do; None for all.
      coordinates: Parameters of the attacked models; None for as many as make the bound sharp.
      confidence: Of lower bounds, each by itself.
      seed: Of the auditor's coins (not of the noise, which is always the library's own); None for
        one from the operating system.
      progress: Called with the number of paths done and the name of the next.

    Returns:
      The record, and the attacks by path, for pictures.
    """
    _extras.require_tensorflow("An audit")
    target = Target(mechanism, mechanism.num_rounds if rounds is None else rounds)
    paths = _checked(available_paths() if paths is None else paths)
    if coordinates is not None:
        coordinates = _checks.int_at_least("coordinates", coordinates, 64)
    confidence = _checks.probability("confidence", confidence)
    rng = np.random.default_rng(seed)
    audited: list[AuditedPath] = []
    attacks: dict[str, Attack] = {}
    for number, name in enumerate(paths):
        if progress is not None:
            progress(number, name)
        if name == _BATCHES:
            audited.append(_audit_batches(target, coordinates or _MOST_EXAMPLES))
        elif name == _MODEL:
            audited += _audit_model(target, coordinates or _MOST_EXAMPLES, confidence, rng)
        else:
            audited += _audit_canaries(target, name, coordinates, confidence, rng, attacks)
    gaussian = audit_errors.epsilon_of_mu(target.claimed_mu, mechanism.delta)
    record = AuditRecord(
        mechanism_checksum=mechanism_checksum(mechanism),
        num_rounds=mechanism.num_rounds,
        rounds=target.rounds,
        delta=mechanism.delta,
        claimed_mu=target.claimed_mu,
        claimed_epsilon=target.claimed_epsilon(mechanism.delta),
        claimed_epsilon_unamplified=gaussian,
        confidence=confidence,
        significance=SIGNIFICANCE,
        paths=tuple(audited),
    )
    return record, attacks


def _checked(paths: Sequence[str]) -> list[str]:
    if not paths:
        raise AuditError(f"paths must name at least one of {', '.join(PATHS)}.")
    for path in paths:
        if path not in PATHS:
            raise AuditError(f"paths must be some of {', '.join(PATHS)}. Found {path!r}.")
        if path not in available_paths():
            raise AuditError(f"The path {path} needs tensorflow_federated, which is not installed.")
    return list(dict.fromkeys(paths))


def default_size(target: Target, name: str, confidence: float) -> tuple[int, int]:
    """Returns how many runs of how many coordinates make the bound of a path tight."""
    path = _CANARY_PATHS[name]
    most = min(_MOST_TRIALS, _MOST_RUNS * path.wide, _MOST_VALUES // target.rounds)
    exposure, fraction = float(np.linalg.norm(target.signals(target.pattern[:, None]))), 1.0
    if path.module == _KERAS:
        from bandmf_tf.audit import keras_paths

        exposure, fraction = keras_paths.exposed(target)
    least = _TIGHT * target.claimed_mu
    trials = statistics.trials_for(exposure, least, confidence, most)
    if trials < most * fraction:  # Else the bound cannot be tight, and none of the rest is for it.
        trials = math.ceil(trials / fraction)
    trials = max(trials, _FEWEST_TRIALS)
    # All pairs of rounds are compared, those of different runs as well.
    most_runs = max(path.runs, 2 * MOST_ROUNDS // target.rounds)
    runs = min(max(path.runs, math.ceil(trials / path.wide)), most_runs)
    return runs, min(math.ceil(trials / runs), 3 * path.wide)


def _audit_canaries(
    target: Target,
    name: str,
    coordinates: int | None,
    confidence: float,
    rng: np.random.Generator,
    attacks: dict[str, Attack],
) -> list[AuditedPath]:
    path = _CANARY_PATHS[name]
    runs = path.runs
    if coordinates is None:
        runs, coordinates = default_size(target, name, confidence)
    run = getattr(importlib.import_module(path.module), path.function)
    if path.module == _KERAS:
        observations = [run(target, coordinates, rng) for _ in range(runs)]
    else:
        drawn = [Canaries.draw(target, coordinates, rng) for _ in range(runs)]
        observations = [run(canaries) for canaries in drawn]
    attacks[name] = found = attack(target, observations)
    delta = target.mechanism.delta
    mu = audit_errors.mu_lower_bound(found.errors, confidence) if found.errors.having else 0.0
    audited = [
        AuditedPath(
            name=name,
            trials=found.errors.having + found.errors.without,
            trials_with_canary=found.errors.having,
            mu_lower=mu,
            epsilon_lower=audit_errors.epsilon_of_mu(mu, delta),
            tests=found.tests,
        )
    ]
    scheme = target.mechanism.sampling
    if path.module == _KERAS and isinstance(scheme, PoissonSampling) and found.errors.having:
        attacks[f"{name}_sampled"] = sampled = sampled_attack(target, scheme, observations, delta)
        audited.append(
            AuditedPath(
                name=f"{name}_sampled",
                trials=sampled.errors.having + sampled.errors.without,
                trials_with_canary=sampled.errors.having,
                mu_lower=None,
                epsilon_lower=audit_errors.epsilon_lower_bound(sampled.errors, delta, confidence),
                tests=sampled.tests,
            )
        )
    return audited


def _audit_batches(target: Target, coordinates: int) -> AuditedPath:
    from bandmf_tf.audit import keras_paths

    scheme, size = keras_paths.scheme_for(target, min(coordinates, _MOST_EXAMPLES))
    runs = [keras_paths.drawn_batches(target, size) for _ in range(2)]
    tests = sampling_tests(scheme, target.mechanism.participation, size, runs)
    return AuditedPath(
        name=_BATCHES,
        trials=0,
        trials_with_canary=0,
        mu_lower=None,
        epsilon_lower=None,
        tests=tuple(tests),
    )


def _audit_model(
    target: Target, coordinates: int, confidence: float, rng: np.random.Generator
) -> list[AuditedPath]:
    from bandmf_tf.audit import keras_paths

    delta = target.mechanism.delta
    epsilon = target.claimed_epsilon(delta)
    scores, included = keras_paths.trained(target, min(coordinates, _MOST_EXAMPLES), rng)
    return [
        AuditedPath(
            name=f"{_MODEL}_{seen.replace(' ', '_')}",
            trials=len(included),
            trials_with_canary=int(included.sum()),
            mu_lower=None,
            epsilon_lower=statistics.one_run_epsilon(values, included, delta, confidence),
            tests=(
                Comparison(
                    "one run",
                    statistics.one_run_claim_p_value(values, included, epsilon, delta),
                ),
            ),
        )
        for seen, values in scores.items()
    ]
