"""TFF aggregators with the noise of a matrix mechanism: clip, sum, add the row of `C^-1 z`, divide.

    factory = BandMFFactory.from_stream(mechanism, clients_per_round=100)
    process = tff.learning.algorithms.build_unweighted_fed_avg(.., model_aggregator=factory)

The sum of the clipped client updates is noised and divided by `clients_per_round`, a number fixed
in advance, never by the number of clients that took part: that number is private, too. Clients
count equally; where TFF asks for a weighted aggregator,
`tff.aggregators.as_weighted_aggregator(factory)` is one that ignores the weights. TFF's own means
(`UnweightedMeanFactory` and the like) can be put around these factories, but they divide by the
actual number and must not be used where that number is private.

Two forms of one mechanism, with the same results for the same seed:

* `BandMFFactory.in_state`: all past noise is in the aggregator's state. Self-contained, and for
  small models only, because TFF copies the state between Python and its worker in every round;
  above `MAX_STATE_BYTES` it is refused.
* `BandMFFactory.from_stream`: the state holds one row. The server program owns the noise stream and
  puts the row of each round into the state before the round (`NoiseSupply`). A round whose row was
  not supplied, or is of another round, fails.

The state of either form holds noise and must stay secret; so must whatever contains it, the state
of the learning process above all. `in_state` therefore narrows the umask of the process, so that
TFF's own state managers write for the owner only.

What a functional framework cannot prevent: a state is a value, and `next` called twice with the
same state, once with each of two cohorts, gives two results with the same row of noise, whose
difference has none. Release at most one result for each state (the production program commits it
first), and never retry a round with another cohort. `NoiseSupply` gives out a row once.

With `adaptive_clipping` the clip norm follows a quantile of the clients' norms, within the same
noise and budget (`noise/adaptive_clipping.py`); it is in the state and in the measurements.

What else would not be private is refused: learning processes that keep what they learn of clients
in a state of their own (Mime and the like, thresholds around the aggregator that adapt to clients
with noise of their own or none, `check_state`), and sums that change records after they were
clipped (`record_aggregation_factory`).
"""

from __future__ import annotations

import collections
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tree
from absl import logging

from bandmf_tf import _checks
from bandmf_tf._numbers import round_up
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise import _dp_query, query
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping
from bandmf_tf.noise.stream import NoiseStream, Structure
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.checkpoints import CheckpointError, LargeArray

# Measured: up to here a round takes seconds at most, at 100 MB tens of seconds, and at 2 GB TFF's
# worker dies of protocol buffers and is restarted for ever.
MAX_STATE_BYTES = 25_000_000

_STEP, _ROW, _ROW_STEP, _SEED = "step", "row", "row_step", "seed"
_FINGERPRINT, _NORM, _ENFORCED = "fingerprint", "l2_norm_clip", "participation_enforced"

# Where TFF keeps the state of an aggregator in that of a learning process, and a query's in it.
_AGGREGATOR, _QUERY_STATE = "aggregator", "query_state"

# Learning rates and the like; more numbers are an array by another name.
_MOST_CLIENT_NUMBERS = 16


class BandMFFactory(tff.aggregators.UnweightedAggregationFactory):
    """Makes aggregators that release the noised mean of client updates; see the module's text.

    Use `from_stream` or `in_state`.

    Args:
      mechanism: The mechanism.
      clients_per_round: The fixed denominator of the mean.
      noise_in_state: Whether the state holds all noise, or one supplied row.
      block_length: Rows of noise made at once if the state holds the noise.
      pinned_seed: For tests only: makes the noise in the state reproducible, by anybody.
      max_state_bytes: States with more noise than this are refused.
      count_records: Whether measurements count clipped and non-finite updates. These counts are
        exact and not covered by the guarantee.
      record_aggregation_factory: How clipped updates are summed: None for a plain sum, or TFF's
        `SecureSumFactory`, which rounds to a grid of 32 bits between its bounds; they must be fixed
        and hold the clip norm and, where records are counted, 1. TFF's native runtime cannot run
        it. Others are refused: quantising or compressing clipped records makes them longer than the
        clip norm.
      adaptive_clipping: How the clip norm adapts, from the mechanism's on; None: it does not. What
        is summed stays within the mechanism's clip norm, and so do the bounds of a secure sum.
      participation_enforced: Whether your program keeps clients to the mechanism's participation,
        by a `ParticipationRegistry` or timers. If not, the factory warns, and states say so
        (`participation_basis`). None: a ledger says it.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        clients_per_round: int,
        *,
        noise_in_state: bool,
        block_length: int | None = None,
        pinned_seed: int | None = None,
        max_state_bytes: int = MAX_STATE_BYTES,
        count_records: bool = True,
        record_aggregation_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        adaptive_clipping: AdaptiveClipping | None = None,
        participation_enforced: bool | None = False,
    ):
        self._mechanism = mechanism
        self._clients_per_round = _checks.positive_int("clients_per_round", clients_per_round)
        self._noise_in_state = noise_in_state
        self._block_length = block_length
        self._pinned_seed = pinned_seed
        self._max_state_bytes = _checks.positive_int("max_state_bytes", max_state_bytes)
        self._count_records = count_records
        self._record_aggregation_factory = record_aggregation_factory
        self._adaptive_clipping = adaptive_clipping
        self._participation_enforced = participation_enforced
        known = (type(None), tff.aggregators.SumFactory, tff.aggregators.SecureSumFactory)
        if type(record_aggregation_factory) not in known:
            raise BandMFTypeError(
                "record_aggregation_factory must be None, TFF's SumFactory or SecureSumFactory; "
                "others may change records after they were clipped, which no noise covers. "
                f"Found {type(record_aggregation_factory).__name__}."
            )
        if not isinstance(participation_enforced, bool | None):
            raise BandMFTypeError(  # Of the word "no" a state would say that it is enforced.
                "participation_enforced must be a bool or None. Found "
                f"{participation_enforced!r:.80}."
            )
        if participation_enforced is False:
            logging.warning("%s", _not_enforced(mechanism))
        if noise_in_state:
            os.umask(os.umask(0o077) | 0o077)

    @classmethod
    def from_stream(
        cls,
        mechanism: Mechanism,
        *,
        clients_per_round: int,
        count_records: bool = True,
        record_aggregation_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        adaptive_clipping: AdaptiveClipping | None = None,
        participation_enforced: bool | None = False,
    ) -> BandMFFactory:
        """Returns a factory whose aggregators are fed by a `NoiseSupply`, with O(d) state."""
        return cls(
            mechanism,
            clients_per_round,
            noise_in_state=False,
            count_records=count_records,
            record_aggregation_factory=record_aggregation_factory,
            adaptive_clipping=adaptive_clipping,
            participation_enforced=participation_enforced,
        )

    @classmethod
    def in_state(
        cls,
        mechanism: Mechanism,
        *,
        clients_per_round: int,
        block_length: int = 1,
        pinned_seed: int | None = None,
        max_state_bytes: int = MAX_STATE_BYTES,
        count_records: bool = True,
        record_aggregation_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        adaptive_clipping: AdaptiveClipping | None = None,
        participation_enforced: bool | None = False,
    ) -> BandMFFactory:
        """Returns a factory whose aggregators hold all noise in their state.

        That is O(num_bands d), for a BLT O(num_buffers d).

        Args:
          mechanism: The mechanism.
          clients_per_round: The fixed denominator of the mean.
          block_length: Rows of noise made at once; they are in the state, too.
          pinned_seed: For tests only: makes the noise reproducible, by anybody.
          max_state_bytes: `create` refuses larger states.
          count_records: Whether measurements count clipped and non-finite updates.
          record_aggregation_factory: How clipped updates are summed, see the class.
          adaptive_clipping: How the clip norm adapts; None: it does not.
          participation_enforced: Whether your program keeps clients to the plan, see the class.
        """
        return cls(
            mechanism,
            clients_per_round,
            noise_in_state=True,
            block_length=block_length,
            pinned_seed=pinned_seed,
            max_state_bytes=max_state_bytes,
            count_records=count_records,
            record_aggregation_factory=record_aggregation_factory,
            adaptive_clipping=adaptive_clipping,
            participation_enforced=participation_enforced,
        )

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Returns the aggregator for values of `value_type`.

        Raises:
          ValueError: The state would be larger than `max_state_bytes`.
        """
        sum_query = self._make_query(value_specs(value_type))
        mean_query = _dp_query.NormalizedQuery(sum_query, float(self._clients_per_round))
        made = tff.aggregators.DifferentiallyPrivateFactory(
            mean_query, self._record_aggregation_factory
        ).create(value_type)
        if tff.structure.flatten(made.initialize.type_signature.result.member.agg_state):
            raise BandMFError(
                "record_aggregation_factory must sum in the same way in every round, and this one "
                "adapts to the records of earlier ones, which no noise covers; give fixed bounds."
            )
        return made

    def _make_query(self, specs: Structure) -> _dp_query.SumAggregationDPQuery:
        options: dict[str, Any] = {"count_records": self._count_records}
        if self._adaptive_clipping is not None:
            options["adaptive_clipping"] = self._adaptive_clipping
            options["expected_records"] = self._clients_per_round
        if not self._noise_in_state:
            supplied = query.SuppliedNoiseSumQuery.from_mechanism(self._mechanism, specs, **options)
            supplied.participation_enforced = self._participation_enforced
            return supplied
        made = query.CorrelatedNoiseSumQuery.from_mechanism(
            self._mechanism,
            specs,
            block_length=self._block_length,
            pinned_seed=self._pinned_seed,
            with_fingerprint=True,
            **options,
        )
        made.participation_enforced = self._participation_enforced
        size = made.stream.state_bytes
        if size > self._max_state_bytes:
            raise BandMFError(
                f"The state would hold {size / 1e6:.0f} MB of noise, which TFF copies in every "
                f"round, more than max_state_bytes={self._max_state_bytes}; keep the noise in the "
                "server program instead, with BandMFFactory.from_stream and a NoiseSupply."
            )
        return made


class TffBaselineFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF's own DP aggregators, with the noise of a mechanism, to compare with.

    Release nothing of its tree: TFF draws the seed of a tree from the clock, which can be guessed.
    Not on workers of others, either: the noise in the state of TFF's tree is sent to them.

    Args:
      mechanism: The mechanism. Its strategy decides which aggregator of TFF is taken: a multiple of
        the identity is `gaussian_fixed`, a tree with the online estimator is `tree_aggregation`.
        Others TFF does not have: give `BandMFFactory` a mechanism with a full tree (OptTreeAgg) or
        a dense strategy (multi-epoch MF).
      clients_per_round: The fixed denominator of the mean.
      noise_seed: Seed of the tree's noise, for tests.
    """

    def __init__(
        self, mechanism: Mechanism, *, clients_per_round: int, noise_seed: int | None = None
    ):
        self._clients_per_round = _checks.positive_int("clients_per_round", clients_per_round)
        self._clip = float(mechanism.l2_norm_clip)
        self._noise_seed = noise_seed
        strategy = mechanism.strategy
        self._is_tree = strategy.kind == TreeStrategy.kind
        match strategy:
            case TreeStrategy(estimator="online"):
                scale = strategy.scale
            case ToeplitzStrategy(num_bands=1):
                scale = float(strategy.coefficients[0])
            case _:
                raise BandMFError(
                    "TFF has independent noise and tree aggregation with the online estimator "
                    f"only; use BandMFFactory for others. Found a {strategy.kind} strategy with "
                    f"num_bands={strategy.num_bands}."
                )
        # TFF's strategies have entries of 1; noise is relative to the strategy's scale.
        self._noise_multiplier = mechanism.noise_multiplier / scale

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Returns TFF's aggregator for values of `value_type`."""
        factory = tff.aggregators.DifferentiallyPrivateFactory
        clients = float(self._clients_per_round)
        if not self._is_tree:
            made = factory.gaussian_fixed(self._noise_multiplier, clients, self._clip)
        else:
            made = factory.tree_aggregation(
                self._noise_multiplier,
                clients,
                self._clip,
                record_specs=value_specs(value_type),
                noise_seed=self._noise_seed,
                use_efficient=True,
            )
        return made.create(value_type)


class NoiseSupply:
    """Puts the rows of a noise stream into the states of `BandMFFactory.from_stream` aggregators.

    The stream is tracked by nobody else; save `stream` with the state of the learning process, and
    restore both from the same checkpoint.

    Args:
      mechanism: The mechanism.
      specs: Structure of `tf.TensorSpec` of what is aggregated, see `value_specs`.
      block_length: Rows made at once; None chooses it.
      on_disk: Whether the caller keeps the stream's chunks in files; see `NoiseStream`.
      pinned_seed: For tests only: makes the noise reproducible, by anybody.
      adaptive_clipping: As the aggregator has it: rows then have one value more.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        specs: Structure,
        *,
        block_length: int | None = None,
        on_disk: bool = False,
        pinned_seed: int | None = None,
        adaptive_clipping: AdaptiveClipping | None = None,
    ):
        rows = query.row_specs(specs, adaptive_clipping)
        # That its rows are of records and votes is all that is to know here.
        self._query = query.SuppliedNoiseSumQuery.from_mechanism(mechanism, rows)
        self._stream = NoiseStream(
            mechanism.strategy,
            mechanism.stddev,
            rows,
            block_length=block_length,
            on_disk=on_disk,
            pinned_seed=pinned_seed,
        )
        self._one_at_a_time = threading.Lock()

    @property
    def stream(self) -> NoiseStream:
        """The noise stream, which holds secrets."""
        return self._stream

    def supply(self, state: Any) -> Any:
        """Returns the state with the row of its round.

        Args:
          state: The state of an aggregator, or any structure with one in it, such as the state of
            a learning process with TFF's zeroing around the aggregator.
        """
        return self._supply(state, any_row=False)

    def supply_next(self, state: Any) -> Any:
        """Returns the state with the next row of the stream, and at the round of that row.

        A state that was at an earlier round is one whose row was given out before, to a result that
        was discarded or lost. Nobody gets that row again: the state goes on with a later one.
        """
        return self._supply(state, any_row=True)

    def _supply(self, state: Any, *, any_row: bool) -> Any:
        path = _path_to(state, _ROW_STEP)
        check_state(state)
        names = (_STEP, _ROW, _ROW_STEP, _FINGERPRINT)
        found = {name: _at(state, (*path, name)) for name in names}
        with self._one_at_a_time:  # Two threads would find the same round, and get two rows.
            if any_row and int(found[_STEP]) < int(self._stream.round):
                found[_STEP] = np.asarray(int(self._stream.round), np.int64)
            supplied = self._query.supply_from(self._stream, found)
        new = {(*path, name): np.asarray(supplied[name]) for name in (_STEP, _ROW, _ROW_STEP)}
        return tree.map_structure_with_path(lambda at, leaf: new.get(at, leaf), state)

    def counters(self) -> dict[str, np.ndarray]:
        """Returns the numbers that belong into a checkpoint, beside the rows."""
        return {f"{n:04d}": variable.numpy() for n, variable in enumerate(self._counters())}

    def chunks(self) -> dict[str, LargeArray]:
        """Returns the rows that belong into a checkpoint."""
        return {
            f"{number:04d}": LargeArray(chunk.key, chunk.read, chunk.replace)
            for number, chunk in enumerate(self._stream.chunks())
        }

    def restore(self, counters: Mapping[str, np.ndarray], chunks: Mapping[str, LargeArray]) -> None:
        """Goes on from a checkpoint.

        Raises:
          CheckpointError: It holds another number of chunks than this mechanism has.
        """
        mine = self._stream.chunks()
        if len(mine) != len(chunks) or len(counters) != len(self._counters()):
            raise CheckpointError(
                f"The checkpoint holds {len(chunks)} chunks of noise and the mechanism needs "
                f"{len(mine)}; continue the run with the version that began it."
            )
        for variable, (_, array) in zip(self._counters(), sorted(counters.items()), strict=True):
            variable.assign(array)
        for chunk, (_, saved) in zip(mine, sorted(chunks.items()), strict=True):
            chunk.restore(saved.read())

    def _counters(self) -> list[tf.Variable]:
        """Returns the variables of the stream that hold a few numbers; the others hold rows."""
        return [variable for variable in self._stream.variables if variable.shape.rank < 2]


def check_state(state: Any) -> None:
    """Refuses a state that can hold what was learned of clients and has no noise.

    Aggregators noise what they aggregate. Mime and algorithms like it aggregate gradients beside it
    and broadcast them, exactly, in the state of the client work. Thresholds that adapt to the norms
    of clients (`tff.aggregators.PrivateQuantileEstimationProcess`, with noise of its own or none),
    put around our aggregator, decide what clients send in later rounds. Numbers such as a learning
    rate are fine.

    Args:
      state: Of a learning process, or of an aggregator. `NoiseSupply.supply` checks it; with
        `BandMFFactory.in_state` call this once, on the initial state.
    """
    leaves = tree.flatten(getattr(state, "client_work", ()))
    held = [leaf for leaf in leaves if np.ndim(leaf) > 0] or leaves[_MOST_CLIENT_NUMBERS:]
    if held:
        raise BandMFError(
            "The learning process keeps arrays in the state of its client work, such as the "
            f"gradients of Mime, of shape {np.shape(held[0])}, and no noise is added to them; use "
            "an algorithm without client state, such as FedAvg or FedSGD."
        )
    path = _path_to_noise(state)
    around = path[: path.index(_AGGREGATOR) + 1] if _AGGREGATOR in path else ()
    own = path[: path.index(_QUERY_STATE)] if _QUERY_STATE in path else path
    for at, leaf in tree.flatten_with_path(state):
        is_beside = at[: len(around)] == around and at[: len(own)] != own
        if is_beside and np.asarray(leaf).dtype.kind == "f":
            raise BandMFError(
                "What is around the aggregator keeps numbers of its own from round to round, such "
                f"as a threshold that adapts to clients ({'/'.join(map(str, at))}), and the "
                "mechanism's noise does not cover them; use a fixed threshold, or "
                "adaptive_clipping of BandMFFactory."
            )


def refresh_noise(state: Any, mechanism: Mechanism, specs: Structure, block_length: int = 1) -> Any:
    """Returns a restored state of a `BandMFFactory.in_state` aggregator, future noise drawn anew.

    Args:
      state: The state of an aggregator, or any structure with one in it.
      mechanism: The mechanism.
      specs: Structure of `tf.TensorSpec` of what is aggregated.
      block_length: As in `BandMFFactory.in_state`.
    """
    path = _path_to(state, _SEED)
    found = {
        at[-1]: tf.convert_to_tensor(leaf)
        for at, leaf in tree.flatten_with_path(state)
        if at[:-1] == path
    }
    made = query.CorrelatedNoiseSumQuery.from_mechanism(
        mechanism,
        query.row_specs(specs, AdaptiveClipping() if _NORM in found else None),
        block_length=block_length,
        count_records=False,
        with_fingerprint=True,
    )
    fresh = {(*path, name): np.asarray(leaf) for name, leaf in made.refresh(found).items()}
    return tree.map_structure_with_path(lambda at, leaf: fresh.get(at, leaf), state)


def mended_leaves(state: Any, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the leaves of a saved state of the kind of `state` as they are saved now.

    Between rounds there is no supplied row; version 0.1 saved a whole row of NaN. States that hold
    the noise had no fingerprint; the caller knows that they are of the mechanism of `state`.
    """
    expected = tree.flatten_with_path(state)
    names = [at[-1] if at else None for at, _ in expected]
    found = list(leaves)
    if len(found) == len(names) - 1 and _SEED in names and _FINGERPRINT in names:
        position = names.index(_FINGERPRINT)
        found.insert(position, np.asarray(expected[position][1]))
    pairs = itertools.zip_longest(found, names[: len(found)])
    return [np.ravel(leaf)[:0] if name == _ROW else leaf for leaf, name in pairs]


def value_specs(value_type: tff.Type) -> Structure:
    """Returns a TFF type of tensors as a structure of `tf.TensorSpec`."""
    if isinstance(value_type, tff.TensorType):
        return tf.TensorSpec(value_type.shape, value_type.dtype)
    if not isinstance(value_type, tff.StructType):
        raise BandMFTypeError(f"Values must be tensors or structures of them. Found {value_type}.")
    elements = [
        (name, value_specs(element)) for name, element in tff.structure.to_elements(value_type)
    ]
    if elements and all(name is not None for name, _ in elements):
        return collections.OrderedDict(elements)
    is_list = isinstance(value_type, tff.StructWithPythonType) and (
        value_type.python_container is list
    )
    return (list if is_list else tuple)(element for _, element in elements)


def participation_basis(state: Any) -> Basis:
    """Returns what a state lets a report say of how clients took part.

    "enforced" if the program that made the aggregator has said so, "assumed" otherwise.
    """
    path = _path_to_noise(state)
    said = [leaf for at, leaf in tree.flatten_with_path(state) if at == (*path, _ENFORCED)]
    return Basis.ENFORCED if said and all(map(bool, said)) else Basis.ASSUMED


def noised_rounds(state: Any) -> int:
    """Returns to how many rounds the aggregator in a state has added their row of noise.

    A round whose result is released must have raised it: a sum of zeros without its row is not
    refused but NaN, which TFF's server may take for no update at all.
    """
    return int(_at(state, (*_path_to_noise(state), _STEP)))


def _not_enforced(mechanism: Mechanism) -> str:
    way = "admit clients by a ParticipationRegistry, as docs/how_to/deploy.md shows"
    if mechanism.sampling is not None:  # A registry draws nobody.
        way = f"draw cohorts by {mechanism.sampling.kind} sampling, and by no other"
    return (
        f"Epsilon {round_up(mechanism.epsilon):g} holds only if "
        f"{mechanism.participation.describe()}, and nothing here enforces it; {way}, then say "
        "participation_enforced=True."
    )


def _path_to_noise(state: Any) -> tuple[Any, ...]:
    """Returns the path of the only aggregator in `state`, of either form."""
    names = {at[-1] for at, _ in tree.flatten_with_path(state) if at}
    if names.isdisjoint((_ROW_STEP, _SEED)):
        raise BandMFError(
            "The learning process has no aggregator of BandMFFactory, and nothing adds noise; pass "
            "model_aggregator, which the builder is called with, on to TFF."
        )
    return _path_to(state, _ROW_STEP if _ROW_STEP in names else _SEED)


def _path_to(state: Any, name: str) -> tuple[Any, ...]:
    """Returns the path of the only structure in `state` that has an entry `name`."""
    paths = [at[:-1] for at, _ in tree.flatten_with_path(state) if at and at[-1] == name]
    if len(paths) != 1:
        kind = "from_stream" if name == _ROW_STEP else "in_state"
        raise BandMFError(
            f"The state must hold one aggregator of BandMFFactory.{kind}. Found {len(paths)}."
        )
    return paths[0]


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        if isinstance(state, Mapping) or isinstance(key, int):
            state = state[key]
        else:
            state = getattr(state, key)
    return state
