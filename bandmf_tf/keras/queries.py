"""A DP query in a Keras optimizer: its global state in variables, one noised result for each step.

Any query that sums preprocessed records will do, those of TensorFlow Privacy included. What the
optimizers of TensorFlow Privacy do with a query that has a state (trees, adaptive clipping, ours)
is not repeated here: they read the state when a step is traced, so that all steps of a compiled
`fit` get the same noise.

A record is the gradient of one example, as a list in the order of the variables. What clips it is
the query's own `preprocess_record`, applied to every gradient of a batch at once. Two queries clip
to a norm that is known to stay what it is, `GaussianSumQuery` of TensorFlow Privacy and our
`CorrelatedNoiseSumQuery`. Only for them the sum of clipped gradients comes from `clipping.py` or
`layer_formulas.py`, which is faster, keeps its bound in spite of rounding, and needs no second copy
of gradients. With any query, a gradient that is not finite contributes nothing.

Before the first step a query is tried out: it must sum, return sums of one step as they are, take
these gradients, keep the types of its state, and have other noise in the next step when it is
compiled. What it cannot show in this way, that it clips and that its noise is enough, is its own
affair: see `QueryNoise.event`.

After a restore our own query draws all further noise anew (see `noise/stream.py`). A query that
cannot do so goes on with the noise that its state decides: a run that died after its last
checkpoint repeats it, which is harmless only if its batches are repeated, too, as those of a
restored pipeline are.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from bandmf_tf.errors import BandMFError
from bandmf_tf.keras._config import BareMechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise.source import fresh_seed

_TFP = "tensorflow_privacy.privacy.dp_query."
_PLAIN = _TFP + "gaussian_query.GaussianSumQuery"
# Queries of which one step has the same event in every state.
_ACCOUNTED = (_PLAIN, _TFP + "quantile_adaptive_clip_sum_query.QuantileAdaptiveClipSumQuery")

_METHODS = (
    "initial_global_state",
    "initial_sample_state",
    "derive_sample_params",
    "preprocess_record",
    "accumulate_preprocessed_record",
    "merge_sample_states",
    "get_noised_result",
)

_PROBE = 2.0**40  # A sum beside which no noise shows.


class QueryError(BandMFError):
    """An optimizer cannot take a DP query, or not this one."""


def check_interface(query: Any) -> None:
    """Raises `QueryError` unless the object has the methods of a DP query."""
    missing = [name for name in _METHODS if not callable(getattr(query, name, None))]
    if missing or isinstance(query, type):
        raise QueryError(
            "query must be a SumAggregationDPQuery, an object and not a class, such as "
            "CorrelatedNoiseSumQuery.from_mechanism(mechanism, specs). Found "
            f"{named(query)}."
        )
    if _is_ours(query, "SuppliedNoiseSumQuery"):
        raise QueryError(
            "SuppliedNoiseSumQuery waits for rows of a server program; use CorrelatedNoiseSumQuery."
        )
    if _is_ours(query) and query.is_adaptive:
        raise QueryError(
            "A clip norm of our own that adapts needs no query: give the optimizer the mechanism "
            "and adaptive_clipping=AdaptiveClipping(...)."
        )


def mechanism_of(query: Any) -> Mechanism | BareMechanism | None:
    """Returns what is known about the noise of a query; None for queries that are not ours."""
    origin = getattr(query, "origin", None) if _is_ours(query) else None
    if isinstance(origin, tuple):
        strategy, noise_multiplier = origin
        return BareMechanism(strategy, noise_multiplier, query.l2_norm_clip)
    return origin


def plain_l2_norm_clip(query: Any) -> float | None:
    """Returns the norm to which a query clips, if that is all it ever does to records."""
    if _is_ours(query):
        return query.l2_norm_clip
    if _is_exactly(query, _PLAIN):
        return float(query.derive_sample_params(query.initial_global_state()))
    return None


class QueryNoise(tf.Module):
    """A query with its state in variables, which checkpoints hold: `noised` takes one step.

    Args:
      query: The query.
      specs: Of the gradients.
    """

    def __init__(self, query: Any, specs: Sequence[tf.TensorSpec]):
        super().__init__(name="query_noise")
        check_interface(query)
        self._untracked = _Untracked(query)
        with tf.init_scope():
            state = _state_of(query)
            shapes = self._try_out(state, list(specs))
            self._state = [
                _variable(value, f"query_state_{i:03d}", shape)
                for i, (value, shape) in enumerate(zip(tf.nest.flatten(state), shapes, strict=True))
            ]
            self._step = _variable(np.int64(0), "step")
            # As in `NoiseStream`: a name of the process with a count, of which checkpoints hold a
            # copy, so that a state that was restored shows.
            lineage = np.array([fresh_seed()[0], 0], np.int64)
            self._lineage = _variable(lineage, "lineage")
            self._untracked.lineage = _variable(lineage, "live_lineage")

    @property
    def round(self) -> tf.Tensor:
        """The number of results that were asked for."""
        return tf.identity(self._step)

    @property
    def sample_specs(self) -> list[tf.TensorSpec]:
        """Of the tensors of a sample state."""
        return self._untracked.sample_specs

    def preprocess(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what the query sums for gradients `[examples, ...]`, for each example."""
        query = self._untracked.query
        params = query.derive_sample_params(self._read_state())

        def one(record: list[tf.Tensor]) -> list[tf.Tensor]:
            return tf.nest.flatten(query.preprocess_record(params, record))

        return tf.vectorized_map(one, gradients)

    def sample_of_sum(self, total: list[tf.Tensor], counts: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of the sample state of gradients that were clipped elsewhere.

        Args:
          total: Sum of the clipped gradients.
          counts: Numbers of gradients, of clipped and of non-finite ones.
        """
        query = self._untracked.query
        sample = query.sample_of_sum(total, counts) if _is_ours(query) else total
        return tf.nest.flatten(sample)

    def make_totals(self) -> list[tf.Variable]:
        """Returns variables to sum sample states in."""
        return [
            _variable(tf.zeros(spec.shape, spec.dtype), "sample_state")
            for spec in self.sample_specs
        ]

    def noised(self, sample: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the noised sums of a step, and goes on to the next."""
        untracked = self._untracked
        state = self._read_state()
        lineage = tf.identity(untracked.lineage)
        if _is_ours(untracked.query) and not untracked.query.is_pinned:
            is_restored = tf.reduce_any(tf.not_equal(self._lineage, lineage))
            flat = tf.cond(
                is_restored,
                lambda: [*map(tf.identity, tf.nest.flatten(untracked.query.refresh(state)))],
                lambda: [*map(tf.identity, tf.nest.flatten(state))],
            )
            state = tf.nest.pack_sequence_as(state, flat)
        sample = tf.nest.pack_sequence_as(untracked.sample, list(sample))
        result, state, _ = untracked.query.get_noised_result(sample, state)
        noised = _tensors(result)
        with tf.control_dependencies(noised):
            for variable, value in zip(self._state, tf.nest.flatten(state), strict=True):
                variable.assign(value)
            self._step.assign(self._step + 1)
            for variable in (self._lineage, untracked.lineage):
                variable.assign(lineage + [0, 1])
        return noised

    def event(self, steps: int) -> dp_accounting.DpEvent:
        """Returns the event of all steps together; `UnsupportedDpEvent` if it is not known.

        It bounds what any participation costs, without amplification. That of a step is trusted
        only if the query is exactly one of which it is known to be the same in all states.
        """
        query = self._untracked.query
        if _is_ours(query):
            return query.run_event
        if not any(_is_exactly(query, name) for name in _ACCOUNTED):
            return dp_accounting.UnsupportedDpEvent()
        zeros = self._packed_sample(0.0)
        _, _, event = query.get_noised_result(zeros, self._read_state())
        return dp_accounting.SelfComposedDpEvent(_with_numbers(event), steps)

    def _read_state(self) -> Any:
        values = [tf.convert_to_tensor(variable) for variable in self._state]
        return tf.nest.pack_sequence_as(self._untracked.state, values)

    def _packed_sample(self, value: float) -> Any:
        flat = [tf.fill(spec.shape, tf.cast(value, spec.dtype)) for spec in self.sample_specs]
        return tf.nest.pack_sequence_as(self._untracked.sample, flat)

    def _try_out(self, state: Any, specs: list[tf.TensorSpec]) -> list[tf.TensorShape]:
        """Checks what can be checked of a query, and returns which shapes its state may have."""
        untracked, query = self._untracked, self._untracked.query
        untracked.state = state
        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        try:
            untracked.sample = query.preprocess_record(query.derive_sample_params(state), zeros)
            flat = _tensors(untracked.sample)
            untracked.sample_specs = [tf.TensorSpec(t.shape, t.dtype) for t in flat]
            for combine in (query.accumulate_preprocessed_record, query.merge_sample_states):
                total = combine(self._packed_sample(3.0), self._packed_sample(4.0))
                _require_value(total, untracked.sample_specs, 7.0, "add its records up")
            if not _is_ours(query):  # Which costs a block of rows, and is known.
                result, after, event = query.get_noised_result(self._packed_sample(_PROBE), state)
                _require_value(
                    result,
                    specs,
                    _PROBE,
                    "return the sum as it is: the optimizer "
                    "divides it, and takes steps of one sum at a time",
                )
                result, _, _ = query.get_noised_result(self._packed_sample(0.0), after)
                _require_value(
                    result,
                    specs,
                    0.0,
                    "forget the sums of earlier steps: the optimizer adds them up itself",
                )
                if _is_non_private(event):
                    raise QueryError(f"{named(query)} adds no noise; use a plain Keras optimizer.")
            shapes, step = self._compiled(state)
            if not _is_ours(query):
                _require_fresh_noise(step, state)
            return shapes
        except QueryError:
            raise
        except Exception as error:
            shapes = [(spec.shape.as_list(), spec.dtype.name) for spec in specs]
            # The rest of a message, and its traceback, may show values of a state.
            reason = str(error).partition("\n")[0][:300]
            raise QueryError(
                f"{named(query)} does not take the gradients of these variables, tensors of "
                f"{shapes}; make it with record_specs=[tf.TensorSpec(v.shape, v.dtype) for v in "
                f"model.trainable_variables], if it has any. It says: {reason}"
            ) from None

    def _compiled(self, state: Any) -> tuple[list[tf.TensorShape], Any]:
        """Returns shapes that the state has now and after every later step, and such a step.

        That is a concrete function from a state to the noise of a step and the state after it.
        """
        query = self._untracked.query
        tensors = _tensors(state)
        shapes = [tensor.shape for tensor in tensors]
        for _ in range(max(1, sum(shape.rank or 0 for shape in shapes))):
            specs = [tf.TensorSpec(s, t.dtype) for s, t in zip(shapes, tensors, strict=True)]

            def noise_and_state(*values: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
                packed = tf.nest.pack_sequence_as(state, list(values))
                noise, packed, _ = query.get_noised_result(self._packed_sample(0.0), packed)
                tf.nest.assert_same_structure(state, packed)
                return _tensors(noise), _tensors(packed)

            step = tf.function(noise_and_state, autograph=False).get_concrete_function(*specs)
            found = step.structured_outputs[1]
            if [t.dtype for t in found] != [t.dtype for t in tensors]:
                raise QueryError(f"{named(query)} changes the types of its state.")
            general = [
                shape.most_specific_compatible_shape(t.shape)
                for shape, t in zip(shapes, found, strict=True)
            ]
            if [g.as_list() if g.rank is not None else None for g in general] == [
                s.as_list() if s.rank is not None else None for s in shapes
            ]:
                break
            shapes = general
        return shapes, step


def identity_of(query: Any) -> int:
    """Returns a number that tells queries apart that are not made from mechanisms, never 0.

    It is made of what their states begin with, twice: what differs is random.
    """
    first, second = (tf.nest.flatten(_state_of(query)) for _ in range(2))
    digest = hashlib.sha256(named(query).encode())
    for one, other in zip(first, second, strict=True):
        digest.update(f"{one.dtype.name} {one.shape}".encode())
        if np.array_equal(one.numpy(), other.numpy()):
            digest.update(one.numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little", signed=True) | 1


class _Untracked:
    """Holds what checkpoints and printouts must not find."""

    state: Any
    sample: Any
    sample_specs: list[tf.TensorSpec]
    lineage: Any

    def __init__(self, query: Any):
        self.query = query

    def __repr__(self) -> str:
        return "<secret>"


def _state_of(query: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, query.initial_global_state())


def _require_value(found: Any, specs: Sequence[tf.TensorSpec], value: float, what: str) -> None:
    tensors = _tensors(found)
    same = [(t.shape, t.dtype) for t in tensors] == [(s.shape, s.dtype) for s in specs]
    tolerance = _PROBE / 2**10 if value in (0.0, _PROBE) else 0.0
    if not same or not all(np.all(np.abs(t.numpy() - value) <= tolerance) for t in tensors):
        raise QueryError(f"A query in an optimizer must {what}, which this one does not.")


def _require_fresh_noise(step: Any, state: Any) -> None:
    """Raises `QueryError` if a tensor has the same noise in two steps of one compiled function.

    So it is with noise that Python draws, which is drawn when a step is traced and never again, and
    with a seed that no step changes: the difference of two releases would show the gradients.
    """
    first, state = step(*tf.nest.flatten(state))
    second, _ = step(*state)
    for one, other in zip(first, second, strict=True):
        if np.any(one) and np.array_equal(one, other):
            raise QueryError(
                f"A query in an optimizer must have new noise in every step, and a tensor of shape "
                f"{one.shape.as_list()} had the same twice; draw it by TensorFlow, not in Python, "
                "from a seed that the global state moves on."
            )


def _tensors(structure: Any) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(structure)]


def _with_numbers(event: Any) -> dp_accounting.DpEvent:
    """Returns the event of Gaussians with numbers in place of tensors."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return dp_accounting.ComposedDpEvent([*map(_with_numbers, event.events)])
    return dp_accounting.GaussianDpEvent(float(event.noise_multiplier))


def _is_non_private(event: Any) -> bool:
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return any(map(_is_non_private, event.events))
    return isinstance(event, dp_accounting.NonPrivateDpEvent)


def _is_ours(query: Any, name: str = "CorrelatedNoiseSumQuery") -> bool:
    return _is_exactly(query, f"bandmf_tf.noise.query.{name}")


def _is_exactly(query: Any, name: str) -> bool:
    """Whether an object is of exactly this class, with no method replaced on it.

    By name, so that nobody imports a library for a query that he does not have.
    """
    module, _, kind = name.rpartition(".")
    return type(query) is getattr(sys.modules.get(module), kind, None) and not any(
        callable(getattr(type(query), attribute, None)) for attribute in vars(query)
    )


def named(query: Any) -> str:
    """Returns what a query is called in messages."""
    kind = query if isinstance(query, type) else type(query)
    return kind.__name__


def _variable(value: Any, name: str, shape: tf.TensorShape | None = None) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        shape=shape,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
