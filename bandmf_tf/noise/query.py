"""DP queries with correlated noise: clip each record, sum, add the row of `C^-1 z`.

Two forms of one mechanism, which give the same results from the same seed:

* `CorrelatedNoiseSumQuery` carries the whole noise stream in its state: self-contained, for TFP and
  for TFF with small models (TFF copies the state every round).
* `SuppliedNoiseSumQuery` carries one row. The stream belongs to the server program, which supplies
  the row of each round before it; a round without its own row fails.

Records
-------
A record is clipped to `l2_norm_clip` in the Euclidean norm over its whole structure, computed in
float64. A record whose norm is not finite (NaN, infinity, or an overflow) contributes zeros and is
counted. A record of another structure, shape or dtype is an error.

With `adaptive_clipping` the clip norm follows a quantile of the norms, from `l2_norm_clip` on:
`adaptive_clipping.py` says how, and why nothing below changes. The clip norm is then in the state,
is computed from what was released, and may be published.

What is released, and its DpEvent
---------------------------------
The results of all rounds together are one release of the Gaussian mechanism: with z of standard
deviation `noise_multiplier * l2_norm_clip` and a strategy of sensitivity s under the participation
that units keep to, the event of the whole run is

    GaussianDpEvent(noise_multiplier / s),                                        `run_event`

however many of its rounds were done. Rounds do not compose: noise that one round adds another takes
away again, so no event of a single round says what it costs. The event that `get_noised_result`
returns is therefore `run_event` at round 0 and, from then on, a Gaussian event with so much noise
that it costs nothing (`NO_FURTHER_COST`). Composed over any number of rounds they are `run_event`.

Without a sensitivity (a query made from a bare strategy) the event is `UnsupportedDpEvent`.
Sampling is not part of it: who draws the batches knows how, and `accounting/` has the events.

Metrics
-------
Fraction clipped and non-finite records are exact counts of private data. They are for the
operator's eyes and no part of the guarantee; with `count_records=False` they are not even computed.
Noise and seeds never appear in metrics. The state holds both and is secret (see `stream.py`).

The base classes are those of TensorFlow Privacy or of TFF, where they are installed
(`_dp_query.py`), so that both take these queries for their own.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf._numbers import exactly
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import strategies
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise import _dp_query
from bandmf_tf.noise import stream as noise_stream
from bandmf_tf.noise.adaptive_clipping import (
    MIN_L2_NORM_CLIP,
    VOTE_SPEC,
    AdaptiveClipping,
    QuantileNorm,
)
from bandmf_tf.noise.stream import State, Structure

# The noise multiplier of an event without cost: infinity, as far as accountants can count.
NO_FURTHER_COST = 1e30

# Names in sample states and global states; "step" is what the number of a round is called there.
_SUM, _COUNTS, _STEP, _ROW, _ROW_STEP = "sum", "counts", "step", "row", "row_step"
_FINGERPRINT, _VOTES, _NORM = "fingerprint", "votes", "l2_norm_clip"
_ENFORCED = "participation_enforced"
_NUM_COUNTS = 3  # Records, clipped records, non-finite records.

# `row_step` of a state that holds no row.
NOT_SUPPLIED = -1


class _ClippedSumQuery(_dp_query.SumAggregationDPQuery, abc.ABC):
    """Clips, counts and sums records; subclasses add noise.

    Args:
      l2_norm_clip: Clip norm.
      layout: Of a row of noise, see `row_specs`.
      run_event: The DpEvent of all rounds together.
      count_records: Whether metrics count clipped and non-finite records.
      adaptive_clipping: How the clip norm adapts; None: it does not.
      expected_records: How many records a round is expected to have, for adaptive clipping.
    """

    # Whether somebody keeps units to the plan, as states say for reports; None: they do not say.
    participation_enforced: bool | None = None

    def __init__(
        self,
        l2_norm_clip: float,
        layout: noise_stream.RowLayout,
        run_event: dp_accounting.DpEvent,
        count_records: bool,
        adaptive_clipping: AdaptiveClipping | None,
        expected_records: float | None,
    ):
        self._l2_norm_clip = _clip_norm(l2_norm_clip)
        if (adaptive_clipping is None) != (expected_records is None):
            raise BandMFError(
                "adaptive_clipping and expected_records, the number of records that a round is "
                "expected to have, go together; give both or none."
            )
        self._adaptive: QuantileNorm | None = None
        self._layout = layout
        self._specs = layout.specs
        if adaptive_clipping is not None:
            self._adaptive = QuantileNorm(adaptive_clipping, self._l2_norm_clip)
            self._specs, _ = layout.specs
            self._expected_records = _checks.positive_float("expected_records", expected_records)
        self._run_event = run_event
        self._count_records = count_records

    @property
    def l2_norm_clip(self) -> float:
        """Clip norm of a record; if it adapts, the first one."""
        return self._l2_norm_clip

    @property
    def is_adaptive(self) -> bool:
        """Whether the clip norm adapts."""
        return self._adaptive is not None

    @property
    def run_event(self) -> dp_accounting.DpEvent:
        """The DpEvent of all rounds together; see the text of the module."""
        return self._run_event

    def derive_sample_params(self, global_state: Mapping[str, Any]) -> tf.Tensor:
        """Returns the clip norm, all that clients need to know."""
        if self._adaptive is not None:
            return tf.convert_to_tensor(global_state[_NORM], tf.float32)
        return tf.constant(self._l2_norm_clip, tf.float32)

    def initial_sample_state(self, template: Structure = None) -> Structure:
        """Returns the sum of no records."""
        template = self._specs if template is None else template
        flat = self._checked_flat(template)
        zeros = [tf.zeros(tensor.shape, tensor.dtype) for tensor in flat]
        return self._sample(tf.nest.pack_sequence_as(template, zeros), tf.zeros([_NUM_COUNTS]))

    def preprocess_record(self, params: tf.Tensor, record: Structure) -> Structure:
        """Returns the clipped record with its counts."""
        tensors = self._checked_flat(record)
        threshold = length = tf.cast(params, tf.float64)
        if self._adaptive is not None:
            threshold, length = self._adaptive.threshold(params), self._adaptive.record_length
        clipped, is_clipped, is_finite = _clipped(tensors, threshold, length)
        counts = tf.cast(tf.stack([True, is_clipped, ~is_finite]), tf.float32)
        return self._sample(tf.nest.pack_sequence_as(record, clipped), counts)

    def sample_of_sum(self, total: Structure, counts: tf.Tensor) -> Structure:
        """Returns the sample state of records that were clipped elsewhere, to a fixed norm.

        Args:
          total: The sum of the clipped records.
          counts: Numbers of records, of clipped and of non-finite ones.
        """
        if self._adaptive is not None:
            raise BandMFError(
                "A clip norm that adapts must clip records here; add them one by one."
            )
        return self._sample(total, tf.cast(counts, tf.float32))

    def get_noised_result(
        self, sample_state: Structure, global_state: Mapping[str, Any]
    ) -> tuple[Structure, State, dp_accounting.DpEvent]:
        """Returns the noised sum, the next state and the event: a pure function of its arguments.

        Called again with the same state it gives the same noise. Release at most one result for
        each round.
        """
        total, votes, counts = self._split_sample(sample_state)
        tensors = self._checked_flat(total)
        sums = [*tensors, *votes]
        row, new_state = self._next_row(sums, global_state)
        noised = [tensor + noise for tensor, noise in zip(sums, tf.nest.flatten(row), strict=True)]
        if self._adaptive is not None:
            *noised, noised_votes = noised
            noised, new_state[_NORM] = self._adaptive.read(
                noised,
                noised_votes,
                self.derive_sample_params(global_state),
                self._expected_records,
            )
        self._say_enforced(new_state)
        if self._count_records:
            new_state[_COUNTS] = counts
        event = self._event(global_state[_STEP])
        return tf.nest.pack_sequence_as(total, noised), new_state, event

    def derive_metrics(
        self, global_state: Mapping[str, Any]
    ) -> collections.OrderedDict[str, tf.Tensor]:
        """Returns rounds done, clip norm and, of the last round, fraction clipped and non-finite.

        The last two are exact counts of private data; see the text of the module.
        """
        metrics = collections.OrderedDict(
            step=global_state[_STEP],
            l2_norm_clip=self.derive_sample_params(global_state),
        )
        if self._count_records:
            records, clipped, non_finite = tf.unstack(global_state[_COUNTS])
            metrics["fraction_clipped"] = clipped / tf.maximum(records, 1.0)
            metrics["non_finite_records"] = tf.cast(non_finite, tf.int64)
        return metrics

    @abc.abstractmethod
    def _next_row(
        self, total: list[tf.Tensor], state: Mapping[str, Any]
    ) -> tuple[Structure, State]:
        """Returns the noise for the sum, and the next state without clip norm and counts."""

    def _completed(self, state: State) -> State:
        """Returns a state with its clip norm, if it adapts, and counts, as they begin."""
        if self._adaptive is not None:
            state[_NORM] = tf.constant(self._adaptive.initial)
        self._say_enforced(state)
        if self._count_records:
            state[_COUNTS] = tf.zeros([_NUM_COUNTS])
        return state

    def _say_enforced(self, state: State) -> None:
        if self.participation_enforced is not None:
            state[_ENFORCED] = tf.constant(self.participation_enforced)

    def _sample(self, total: Structure, counts: tf.Tensor) -> Structure:
        if not self._count_records and self._adaptive is None:
            return total
        sample = collections.OrderedDict([(_SUM, total)])
        if self._adaptive is not None:
            sample[_VOTES] = self._adaptive.votes(*tf.unstack(counts))
        if self._count_records:
            sample[_COUNTS] = counts
        return sample

    def _split_sample(self, sample: Structure) -> tuple[Structure, list[Any], tf.Tensor | None]:
        if not self._count_records and self._adaptive is None:
            return sample, [], None
        votes = [] if self._adaptive is None else [sample[_VOTES]]
        return sample[_SUM], votes, sample.get(_COUNTS)

    def _checked_flat(self, record: Structure, specs: Structure = None) -> list[Any]:
        """Returns the tensors of a record; raises if it is not what the query was made for.

        Lists and tuples count as the same: TFF turns one into the other.
        """
        specs = self._specs if specs is None else specs
        if _outline(record) != _outline(specs):
            raise BandMFError(
                f"A record must have the structure {_shown(specs)}. Found {_shown(record)}."
            )
        pairs = zip(tf.nest.flatten(record), tf.nest.flatten(specs), strict=True)
        return [self._checked(leaf, spec) for leaf, spec in pairs]

    def _checked(self, leaf: Any, spec: tf.TensorSpec) -> Any:
        is_spec = isinstance(leaf, tf.TensorSpec)
        leaf = leaf if is_spec else tf.convert_to_tensor(leaf)
        if leaf.dtype != spec.dtype or not spec.shape.is_compatible_with(leaf.shape):
            raise BandMFError(
                f"A record must have tensors {_shown(self._specs)}. Found one of shape "
                f"{leaf.shape} and {leaf.dtype.name} for {_shown(spec)}."
            )
        # A dimension not known before the graph runs: a sum that broadcasts would multiply norms.
        return leaf if is_spec else tf.ensure_shape(leaf, spec.shape)

    def _event(self, number: tf.Tensor) -> dp_accounting.DpEvent:
        if not isinstance(self._run_event, dp_accounting.GaussianDpEvent):
            return self._run_event
        whole_run = tf.constant(self._run_event.noise_multiplier, tf.float64)
        no_cost = tf.constant(NO_FURTHER_COST, tf.float64)
        multiplier = tf.where(tf.equal(number, 0), whole_run, no_cost)
        if tf.executing_eagerly():
            multiplier = float(multiplier)
        return dp_accounting.GaussianDpEvent(multiplier)


class CorrelatedNoiseSumQuery(_ClippedSumQuery):
    """A sum of clipped records with the noise of a matrix mechanism, state in, state out.

    Use `from_mechanism` or `from_strategy`.

    Args:
      stream: The noise.
      l2_norm_clip: Clip norm of a record.
      run_event: The DpEvent of all rounds together.
      count_records: Whether metrics count clipped and non-finite records.
      pinned_seed: For tests only: makes the noise reproducible, by anybody.
      fingerprint: If given, states carry it, and a state with another one is refused.
      adaptive_clipping: How the clip norm adapts; None: it does not.
      expected_records: How many records a round is expected to have, for adaptive clipping.
    """

    def __init__(
        self,
        stream: noise_stream.FunctionalNoiseStream,
        l2_norm_clip: float,
        run_event: dp_accounting.DpEvent,
        *,
        count_records: bool = True,
        pinned_seed: int | None = None,
        fingerprint: int | None = None,
        adaptive_clipping: AdaptiveClipping | None = None,
        expected_records: float | None = None,
    ):
        super().__init__(
            l2_norm_clip,
            stream.layout,
            run_event,
            count_records,
            adaptive_clipping,
            expected_records,
        )
        self._stream = stream
        self._pinned_seed = pinned_seed
        self._fingerprint = fingerprint
        self._origin: Mechanism | tuple[strategies.Strategy, float] | None = None

    @classmethod
    def from_mechanism(
        cls,
        mechanism: Mechanism,
        record_specs: Structure,
        *,
        block_length: int | None = None,
        count_records: bool = True,
        pinned_seed: int | None = None,
        with_fingerprint: bool = False,
        adaptive_clipping: AdaptiveClipping | None = None,
        expected_records: float | None = None,
    ) -> CorrelatedNoiseSumQuery:
        """Returns the query of a planned mechanism.

        Args:
          mechanism: The mechanism.
          record_specs: Structure of `tf.TensorSpec` of a record.
          block_length: Rows of noise made at once; see `FunctionalNoiseStream`.
          count_records: Whether metrics count clipped and non-finite records.
          pinned_seed: For tests only: makes the noise reproducible, by anybody.
          with_fingerprint: Whether states say which mechanism and records they are of.
          adaptive_clipping: How the clip norm adapts, from the mechanism's on; None: it does not.
          expected_records: How many records a round is expected to have, for adaptive clipping.
        """
        specs = row_specs(record_specs, adaptive_clipping)
        fingerprint = mechanism_fingerprint(mechanism, specs) if with_fingerprint else None
        query = cls(
            noise_stream.FunctionalNoiseStream(
                mechanism.strategy, mechanism.stddev, specs, block_length=block_length
            ),
            mechanism.l2_norm_clip,
            mechanism_event(mechanism),
            count_records=count_records,
            pinned_seed=pinned_seed,
            fingerprint=fingerprint,
            adaptive_clipping=adaptive_clipping,
            expected_records=expected_records,
        )
        query._origin = mechanism
        return query

    @classmethod
    def from_strategy(
        cls,
        strategy: strategies.Strategy,
        noise_multiplier: float,
        l2_norm_clip: float,
        record_specs: Structure,
        *,
        sensitivity: float | None = None,
        block_length: int | None = None,
        count_records: bool = True,
        pinned_seed: int | None = None,
    ) -> CorrelatedNoiseSumQuery:
        """Returns the query of a strategy as it is scaled.

        Args:
          strategy: The strategy C.
          noise_multiplier: Standard deviation of z over the clip norm.
          l2_norm_clip: Clip norm of a record.
          record_specs: Structure of `tf.TensorSpec` of a record.
          sensitivity: Of the strategy at clip norm 1 under the participation that units keep to
            (`factorization/sensitivity.py`); without it the query has no DpEvent.
          block_length: Rows of noise made at once; see `FunctionalNoiseStream`.
          count_records: Whether metrics count clipped and non-finite records.
          pinned_seed: For tests only: makes the noise reproducible, by anybody.
        """
        noise_multiplier = _checks.positive_float("noise_multiplier", noise_multiplier)
        l2_norm_clip = _checks.positive_float("l2_norm_clip", l2_norm_clip)
        query = cls(
            noise_stream.FunctionalNoiseStream(
                strategy, noise_multiplier * l2_norm_clip, record_specs, block_length=block_length
            ),
            l2_norm_clip,
            gaussian_event(noise_multiplier, sensitivity),
            count_records=count_records,
            pinned_seed=pinned_seed,
        )
        query._origin = (strategy, noise_multiplier)
        return query

    @property
    def stream(self) -> noise_stream.FunctionalNoiseStream:
        """The noise."""
        return self._stream

    @property
    def origin(self) -> Mechanism | tuple[strategies.Strategy, float] | None:
        """The mechanism, or strategy and noise multiplier, that the query was made from."""
        return self._origin

    @property
    def is_pinned(self) -> bool:
        """Whether the noise is that of a test, which anybody can reproduce."""
        return self._pinned_seed is not None

    def initial_global_state(self) -> State:
        """Returns the state before round 0, with a seed drawn whenever TensorFlow runs this."""
        state = self._stream.initial_state(self._pinned_seed)
        return self._completed(self._with_fingerprint(state))

    def refresh(self, global_state: Mapping[str, Any]) -> State:
        """Returns a state that was saved and restored, with all future noise drawn anew.

        Results of rounds after the state was saved may have been released; their noise must not
        protect other records (see `stream.py`).
        """
        self._check_fingerprint(global_state)
        state = self._with_fingerprint(self._stream.refresh(global_state))
        kept = [_NORM] * self.is_adaptive + [_COUNTS] * self._count_records
        state.update((name, global_state[name]) for name in kept)
        self._say_enforced(state)
        return state

    def _next_row(
        self, total: list[tf.Tensor], state: Mapping[str, Any]
    ) -> tuple[Structure, State]:
        del total
        with tf.control_dependencies(self._check_fingerprint(state)):
            row, new_state = self._stream.next(state)
        return row, self._with_fingerprint(new_state)

    def _with_fingerprint(self, state: State) -> State:
        if self._fingerprint is not None:
            state[_FINGERPRINT] = tf.constant(self._fingerprint, tf.int64)
        return state

    def _check_fingerprint(self, state: Mapping[str, Any]) -> list[tf.Operation]:
        """Returns what must run before the state is used; raises in eager mode."""
        if self._fingerprint is None:
            return []
        check = tf.debugging.assert_equal(
            tf.convert_to_tensor(state[_FINGERPRINT], tf.int64),
            tf.constant(self._fingerprint, tf.int64),
            message="The state belongs to another mechanism or to records of other shapes, whose "
            "noise this one would take back wrongly; go on with the mechanism that made it.",
        )
        return [check] if check is not None else []


class SuppliedNoiseSumQuery(_ClippedSumQuery):
    """A sum of clipped records with a row of noise that somebody else supplies, O(d) state.

    The server program owns the noise stream. Before a round it puts the round's row into the state:

        state = query.supply_from(stream, state)        # a NoiseStream at the same round

    The row is used once: the state after the round holds none. A round fails, instead of releasing
    a sum without noise or with noise of another round, when its state holds no row or the row of
    another round:

    * with an error, `tf.errors.InvalidArgumentError`;
    * and the result is NaN in every value, should something have removed the check from a graph.

    The state carries a fingerprint of the mechanism and of the records' layout, and takes rows of a
    query with the same one only.

    One exception: frameworks (TFF among them) run a query once on zeros to find out its types. In a
    graph, a sum of zeros without a row gives NaN and no error, and the round does not advance. In
    eager mode it is an error like any other.

    Args:
      num_rounds: Number of rounds that the mechanism plans.
      l2_norm_clip: Clip norm of a record.
      record_specs: Structure of `tf.TensorSpec` of a record.
      run_event: The DpEvent of all rounds together.
      fingerprint: Of the mechanism, see `mechanism_fingerprint`.
      count_records: Whether metrics count clipped and non-finite records.
      adaptive_clipping: How the clip norm adapts; None: it does not.
      expected_records: How many records a round is expected to have, for adaptive clipping.
    """

    def __init__(
        self,
        num_rounds: int,
        l2_norm_clip: float,
        record_specs: Structure,
        run_event: dp_accounting.DpEvent,
        fingerprint: int,
        *,
        count_records: bool = True,
        adaptive_clipping: AdaptiveClipping | None = None,
        expected_records: float | None = None,
    ):
        layout = noise_stream.RowLayout(row_specs(record_specs, adaptive_clipping))
        super().__init__(
            l2_norm_clip, layout, run_event, count_records, adaptive_clipping, expected_records
        )
        self._num_rounds = _checks.positive_int("num_rounds", num_rounds)
        self._fingerprint = fingerprint

    @classmethod
    def from_mechanism(
        cls,
        mechanism: Mechanism,
        record_specs: Structure,
        *,
        count_records: bool = True,
        adaptive_clipping: AdaptiveClipping | None = None,
        expected_records: float | None = None,
    ) -> SuppliedNoiseSumQuery:
        """Returns the query of a planned mechanism.

        Its noise is `NoiseStream(mechanism.strategy, mechanism.stddev, specs)` with
        `row_specs(record_specs, adaptive_clipping)` for specs.
        """
        return cls(
            mechanism.num_rounds,
            mechanism.l2_norm_clip,
            record_specs,
            mechanism_event(mechanism),
            mechanism_fingerprint(mechanism, row_specs(record_specs, adaptive_clipping)),
            count_records=count_records,
            adaptive_clipping=adaptive_clipping,
            expected_records=expected_records,
        )

    def initial_global_state(self) -> State:
        """Returns the state before round 0, without a row."""
        return self._completed(self._without_row(tf.zeros([], tf.int64)))

    def supply_row(self, global_state: Mapping[str, Any], row: Structure, number: int) -> State:
        """Returns the state with the row for its round; for eager use by the server program.

        Args:
          global_state: The state before the round. It may come from TFF, as NumPy arrays.
          row: The row, in the structure of a record, or of `row_specs` if the clip norm adapts.
          number: The round that the row belongs to, which must be the state's.
        """
        if int(global_state[_FINGERPRINT]) != self._fingerprint:
            raise BandMFError(
                "The state belongs to another mechanism or to records of other shapes than "
                f"{_shown(self._specs)}, and this row would leave some of them without "
                "noise; make the noise supply from the mechanism, the specs and the "
                "adaptive_clipping of the aggregator."
            )
        if int(number) != int(global_state[_STEP]):
            raise BandMFError(
                f"The state is at round {int(global_state[_STEP])} and needs its row. "
                f"Found the row of round {int(number)}."
            )
        vector = self._layout.pack(self._checked_flat(row, self._layout.specs))
        if not bool(tf.reduce_all(tf.math.is_finite(vector[: self._layout.dimension]))):
            raise BandMFError(
                f"A row of noise must be finite. Found NaN or infinity at round {number}."
            )
        state = State(global_state)
        state[_ROW], state[_ROW_STEP] = vector, tf.constant(number, tf.int64)
        return state

    def supply_from(
        self, stream: noise_stream.NoiseStream, global_state: Mapping[str, Any]
    ) -> State:
        """Takes the next row of a stream that is at the state's round, and supplies it."""
        number = int(stream.round)
        if number != int(global_state[_STEP]):
            raise BandMFError(
                f"The noise stream is at round {number} and the state at round "
                f"{int(global_state[_STEP])}; restore both from the same checkpoint."
            )
        return self.supply_row(global_state, stream.next_in_graph(), number)

    def _next_row(
        self, total: list[tf.Tensor], state: Mapping[str, Any]
    ) -> tuple[Structure, State]:
        number, row_round = state[_STEP], state[_ROW_STEP]
        is_ours = tf.equal(state[_FINGERPRINT], self._fingerprint)
        is_supplied = is_ours & tf.equal(row_round, number) & (number < self._num_rounds)
        is_supplied &= tf.equal(tf.size(state[_ROW]), self._layout.width)
        may_pass = is_supplied
        if not tf.executing_eagerly():
            is_zero = tf.reduce_all([tf.reduce_all(tf.equal(tensor, 0)) for tensor in total])
            may_pass |= is_zero & tf.equal(row_round, NOT_SUPPLIED)
        message = (
            "A round needs the row of noise that belongs to it; supply one for every round, of "
            f"num_rounds={self._num_rounds} at most. Round, and round of its row (-1: none):"
        )
        check = tf.debugging.Assert(may_pass, [message, number, row_round])
        with tf.control_dependencies([check] if check is not None else []):
            row = self._nan_unless(is_supplied, state[_ROW])
            next_round = number + tf.cast(is_supplied, tf.int64)
        return self._layout.unpack(row), self._without_row(next_round)

    def _nan_unless(self, is_supplied: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        shape = tf.TensorShape([self._layout.width])

        def nan() -> tf.Tensor:
            return tf.fill(shape, tf.constant(float("nan"), self._layout.dtype))

        if not shape.is_compatible_with(row.shape):
            return nan()
        return tf.cond(is_supplied, lambda: tf.ensure_shape(row, shape), nan)

    def _without_row(self, number: tf.Tensor) -> State:
        """Returns the state between rounds, whose row is empty: states are copied, and saved."""
        nothing = tf.zeros([0], self._layout.dtype)
        if not tf.executing_eagerly():  # TFF asks for the type: a vector of any length.
            nothing = tf.compat.v1.placeholder_with_default(nothing, [None])
        not_supplied = tf.constant(NOT_SUPPLIED, tf.int64)
        fingerprint = tf.constant(self._fingerprint, tf.int64)
        return State(
            [
                (_STEP, number),
                (_ROW, nothing),
                (_ROW_STEP, not_supplied),
                (_FINGERPRINT, fingerprint),
            ]
        )


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped records; the counts are exact, of private data, and for operators alone.

    Attributes:
      total: The sum, in float64: in float32 one record could move it by more than its norm.
      num_records: How many records there were.
      num_clipped: How many were longer than the clip norm.
      num_non_finite: How many had NaN or infinity in them, and count as zeros.
    """

    total: np.ndarray
    num_records: int
    num_clipped: int
    num_non_finite: int


def clipped_sum(records: Iterable[Any], l2_norm_clip: float, spec: tf.TensorSpec) -> ClippedSum:
    """Returns what a loop of one's own adds a row of noise to.

    Every record is clipped as the queries do it: to norm `l2_norm_clip` at most, and one with NaN
    or infinity in it, or of a norm beyond floating point, to zeros.

    Args:
      records: Arrays, one of each unit.
      l2_norm_clip: The mechanism's.
      spec: Shape and dtype of a record, as `NoiseStream` has it.

    Raises:
      BandMFError: A record has another shape, or does not hold numbers.
    """
    clip = tf.constant(_clip_norm(l2_norm_clip), tf.float64)
    total, counts = np.zeros(spec.shape), np.zeros(_NUM_COUNTS, int)
    for record in records:
        try:
            with np.errstate(over="ignore"):
                array = np.asarray(record, np.float64).astype(spec.dtype.as_numpy_dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise BandMFError(f"A record must be an array of real numbers: {error}.") from error
        if array.shape != tuple(spec.shape):  # A sum that broadcasts would multiply norms.
            raise BandMFError(
                f"A record must have the shape {tuple(spec.shape)}. Found {array.shape}."
            )
        tensor = tf.constant(array)
        (clipped,), is_clipped, is_finite = _clipped([tensor], clip, clip)
        total += clipped.numpy()
        counts += [1, bool(is_clipped), not bool(is_finite)]
    return ClippedSum(total, *map(int, counts))


def _clip_norm(value: object) -> float:
    """Returns a clip norm that no record escapes."""
    norm = _checks.positive_float("l2_norm_clip", value)
    if norm < MIN_L2_NORM_CLIP:
        raise BandMFError(
            f"l2_norm_clip must be at least {exactly(MIN_L2_NORM_CLIP)}: smaller norms may "
            f"vanish in float32 and go unclipped. Found {norm}; scale the records up."
        )
    return norm


def _clipped(
    tensors: list[tf.Tensor], threshold: tf.Tensor, length: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Returns tensors of norm `length` at most; whether they were longer than `threshold`; finite.

    Those of a norm that is not finite become zeros.
    """
    # In float32 the squares of a few million values lose digits, and some vanish or overflow.
    norm = tf.linalg.global_norm([tf.cast(tensor, tf.float64) for tensor in tensors])
    is_finite = tf.math.is_finite(norm)
    is_clipped = is_finite & (norm > threshold)
    scale = length / tf.where(is_clipped, norm, threshold)
    # In two factors, because the smallest scales would vanish in float32; a product with 0 would
    # keep NaN. Products in float64 would take five times the memory of the record.
    scale = tf.where(is_finite, scale, tf.zeros_like(norm))
    power = tf.where(scale < 2.0**-64, tf.constant(2.0**-64, norm.dtype), tf.ones_like(norm))
    clipped = [
        tf.math.multiply_no_nan(
            tensor * tf.cast(power, tensor.dtype), _rounded_down(scale / power, tensor.dtype)
        )
        for tensor in tensors
    ]
    return clipped, is_clipped, is_finite


def _rounded_down(scale: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns a number of at most `scale`, which is not negative, in a type of fewer digits."""
    rounded = tf.cast(scale, dtype)
    is_above = tf.cast(rounded, scale.dtype) > scale
    return tf.where(is_above, tf.math.nextafter(rounded, tf.zeros_like(rounded)), rounded)


def row_specs(record_specs: Structure, adaptive_clipping: AdaptiveClipping | None) -> Structure:
    """Returns the specs of a row of noise: of a record, with its vote if the clip norm adapts."""
    return record_specs if adaptive_clipping is None else (record_specs, VOTE_SPEC)


def mechanism_fingerprint(mechanism: Mechanism, record_specs: Structure) -> int:
    """Returns a number that differs for other noise and for records laid out otherwise.

    It is made of numbers as they are stored, equal on every machine: sixteen rows of the strategy,
    the noise, and the shapes.
    """
    rounds = np.linspace(0, mechanism.num_rounds - 1, 16).astype(int)
    layout = [(spec.shape.as_list(), spec.dtype.name) for spec in tf.nest.flatten(record_specs)]
    digest = hashlib.sha256(f"{mechanism.num_rounds} {mechanism.stddev!r} {layout}".encode())
    for i in rounds:
        digest.update(mechanism.strategy.row(int(i)).tobytes())
    return int(digest.hexdigest()[:15], 16)


def mechanism_event(mechanism: Mechanism) -> dp_accounting.DpEvent:
    """Returns the DpEvent of all rounds of a mechanism together, without amplification.

    For units that keep to the mechanism's participation, and zero-out neighbours.
    """
    return gaussian_event(mechanism.noise_multiplier, mechanism.sensitivity.value)


def gaussian_event(noise_multiplier: float, sensitivity: float | None) -> dp_accounting.DpEvent:
    """Returns the DpEvent of a run, `UnsupportedDpEvent` if the sensitivity is not known."""
    if sensitivity is None:
        return dp_accounting.UnsupportedDpEvent()
    sensitivity = _checks.positive_float("sensitivity", sensitivity)
    return dp_accounting.GaussianDpEvent(noise_multiplier / sensitivity)


def _outline(structure: Structure) -> Any:
    """Returns what makes two structures of tensors flatten in the same order, and no more."""
    if isinstance(structure, Mapping):
        return {key: _outline(value) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        fields = getattr(structure, "_fields", ())
        return [fields, *map(_outline, structure)]
    return None


def _shown(structure: Structure) -> str:
    """Returns shapes and dtypes of a structure, never its values."""

    def show(leaf: Any) -> str:
        leaf = leaf if hasattr(leaf, "dtype") else tf.convert_to_tensor(leaf)
        return f"{tf.as_dtype(leaf.dtype).name}{list(leaf.shape)}"

    return str(tf.nest.map_structure(show, structure)).replace("'", "")
