"""Tells from the bits of one float32 release whether a record took part.

    python -m benchmarks.float32_releases

The stated guarantee is (1, 1e-6)-DP. The proofs are about real numbers; the releases are float32.
Two adversaries use the difference:

* `sum` knows all records, and not whether the last one took part. It *refutes* a world by one
  coordinate that no float32 noise can turn from the sum of that world into the released value.
* `own row` knows no record. It looks at coordinates that no other record touches, as in the row of
  a rare word, for values that are no float32 multiple of a float32 Gaussian.

No epsilon allows an adversary to be right every time. docs/limitations.md states what this printed.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl import app, flags

import bandmf_tf as bm
from bandmf_tf.noise.query import CorrelatedNoiseSumQuery

_RUNS = flags.DEFINE_integer("runs", 16, "Runs of each attack; odd ones without the record.")
_DIMENSION = flags.DEFINE_integer("dimension", 10_000, "Values in a released sum.")
_OTHERS = flags.DEFINE_integer("others", 30, "Other records in it.")
_SEED = flags.DEFINE_integer("seed", 1, "Of records and noise.")

_ROUNDS, _BANDS = 24, 8
_ROW = 96  # Values in a row of an embedding.
_NEAR = 4  # Candidates are so many float32 numbers away at most, in each direction.


def _mechanism() -> bm.Mechanism:
    request = bm.PlanRequest(
        workload=bm.prefix_sum(_ROUNDS),
        epsilon=1.0,
        delta=1e-6,
        participation=bm.MinSeparation(_BANDS),
        num_bands=_BANDS,
    )
    return bm.plan_mechanism(request).mechanism


def _release(mechanism: bm.Mechanism, records: list[np.ndarray], seed: int) -> np.ndarray:
    """Returns the first round's noised sum, as the query releases it."""
    query = CorrelatedNoiseSumQuery.from_mechanism(
        mechanism, tf.TensorSpec(records[0].shape, tf.float32), pinned_seed=seed
    )
    result, *_ = query.get_noised_result(_sum(query, records), query.initial_global_state())
    return result.numpy()


def _sum(query: CorrelatedNoiseSumQuery, records: list[np.ndarray]) -> dict:
    params = query.derive_sample_params(query.initial_global_state())
    sample = query.initial_sample_state(tf.zeros(records[0].shape))
    for record in records:
        sample = query.accumulate_record(params, sample, tf.constant(record))
    return sample


def _clipped_sum(mechanism: bm.Mechanism, records: list[np.ndarray]) -> np.ndarray:
    """Returns what the adversary of `sum` computes: the sum of a world, by the query's own code."""
    spec = tf.TensorSpec(records[0].shape, tf.float32)
    query = CorrelatedNoiseSumQuery.from_mechanism(mechanism, spec, pinned_seed=0)
    return _sum(query, records)["sum"].numpy()


def _around(values: np.ndarray) -> np.ndarray:
    """Returns float32 numbers around float64 values, on a new first axis."""
    below = above = values.astype(np.float32)
    candidates = [below]
    for _ in range(_NEAR):
        below = np.nextafter(below, np.float32(-np.inf))
        above = np.nextafter(above, np.float32(np.inf))
        candidates += [below, above]
    return np.stack(candidates)


def _refutations(released: np.ndarray, total: np.ndarray) -> int:
    """Returns how many released values are total + w in float32 for no float32 w."""
    noise = _around(released.astype(np.float64) - total.astype(np.float64))
    return int(np.sum(~np.any(total + noise == released, axis=0)))


def _impossible(released: np.ndarray, factor: np.float32) -> int:
    """Returns how many released values are factor * z in float32 for no float32 z."""
    gaussians = _around(released.astype(np.float64) / float(factor))
    return int(np.sum(~np.any(factor * gaussians == released, axis=0)))


def _clipped_records(rng: np.random.Generator, number: int) -> list[np.ndarray]:
    records = rng.normal(size=(number, _DIMENSION.value)).astype(np.float32)
    return list(records / np.linalg.norm(records, axis=1, keepdims=True))


def main(argv: list[str]) -> None:
    """Runs both attacks and prints how often each was right."""
    del argv
    mechanism = _mechanism()
    rng = np.random.default_rng(_SEED.value)
    factor = np.float32(mechanism.stddev / mechanism.strategy.row(0)[-1])
    right = {"sum": 0, "own row": 0}
    for number in range(_RUNS.value):
        took_part = number % 2 == 0
        *others, target = _clipped_records(rng, _OTHERS.value + 1)
        records = [*others, target if took_part else np.zeros_like(target)]
        released = _release(mechanism, records, _SEED.value + number)
        with_it, without = (
            _refutations(released, _clipped_sum(mechanism, [*others, record]))
            for record in (target, np.zeros_like(target))
        )
        right["sum"] += (with_it == 0 < without) if took_part else (without == 0 < with_it)

        row = np.zeros(_ROW, np.float32)
        if took_part:
            row = rng.normal(size=_ROW).astype(np.float32) / np.float32(np.sqrt(_ROW))
        values = _impossible(_release(mechanism, [row], 1000 + number), factor)
        right["own row"] += (values > 0) == took_part
        print(
            f"run {number + 1}, the record {'in' if took_part else 'out'}: coordinates that refute "
            f"in: {with_it}, out: {without}; values of the own row that are no noise: {values}",
            flush=True,
        )
    for name, count in right.items():
        print(f"{name}: right in {count} of {_RUNS.value} runs, at a stated epsilon of 1")


if __name__ == "__main__":
    app.run(main)
