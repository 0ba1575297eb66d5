"""What a private optimizer is made with, and the variables that the next step depends on.

All of it is in variables that checkpoints and Keras's files hold. Three of them guard against a
restore that left something behind: Keras's own `iterations` must agree with the step of the noise,
a fingerprint of the mechanism must be the optimizer's, and one of the sampling seed must be the
pipeline's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf._numbers import exactly
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.keras import _compat, _config, queries
from bandmf_tf.keras._config import BareMechanism
from bandmf_tf.keras.batches import Batches
from bandmf_tf.keras.clipping import AdaptiveNorm, check_precision
from bandmf_tf.keras.queries import QueryNoise
from bandmf_tf.mechanisms.files import load_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise.adaptive_clipping import VOTE_SPEC, AdaptiveClipping, QuantileNorm
from bandmf_tf.noise.source import fresh_seed
from bandmf_tf.noise.stream import NoiseStream

UNCHECKED = "unchecked"
"""In place of a sampling scheme: "I know how batches are drawn, do not check"."""

_LEAST_NOISE = 2.0**-63  # Far from where float32 has zeros in place of small numbers.

_LOGGER = logging.getLogger(__name__)

if TYPE_CHECKING:
    _KerasOptimizer = Any  # What the class is mixed with has no types.
else:
    _KerasOptimizer = object


class PrivacyError(BandMFError):
    """Going on would not be private, or not in the way that was planned."""


class OptimizerState(_KerasOptimizer):
    """Construction, configuration and variables of a private optimizer; see `PrivateOptimizer`."""

    def __init__(
        self,
        mechanism: Mechanism | BareMechanism | str | os.PathLike[str] | None = None,
        *args: Any,
        query: Any = None,
        adaptive_clipping: AdaptiveClipping | None = None,
        batch_size: float | None = None,
        sampling: Batches | SamplingScheme | str | None = None,
        microbatch_size: int = 1,
        accumulation_steps: int = 1,
        chunk_size: int | None = None,
        noise_memory_bytes: int | None = None,
        pinned_seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        _compat.check_optimizer(self)
        if mechanism is None and query is None:
            name = type(self).__name__.removeprefix("Private")
            raise PrivacyError(
                f"A private optimizer needs a mechanism first: {name}('plan.bandmf', "
                "learning_rate=...), or a DP query by query=..., for its noise."
            )
        if mechanism is not None and query is not None:
            raise PrivacyError(
                "Noise comes from one place: give the optimizer a mechanism or query=..., and not "
                "both."
            )
        if query is not None:
            mechanism = _checked_query(query, microbatch_size, pinned_seed, noise_memory_bytes)
        elif isinstance(mechanism, str | os.PathLike):
            mechanism = load_mechanism(mechanism)
        if isinstance(mechanism, Mechanism):
            mechanism.require_verified()
        elif not isinstance(mechanism, BareMechanism | None):
            raise BandMFTypeError(
                "The first argument of a private optimizer is a mechanism or the path of its file, "
                f"and the learning rate follows. Found {mechanism!r}."
            )
        if mechanism is not None and not _LEAST_NOISE <= mechanism.stddev <= 1 / _LEAST_NOISE:
            raise PrivacyError(
                f"Noise of standard deviation {mechanism.stddev:.2g} vanishes or overflows in "
                f"float32; scale the loss, so that "
                f"l2_norm_clip={exactly(mechanism.l2_norm_clip)} can be nearer to 1."
            )
        if adaptive_clipping is not None and (query is not None or microbatch_size != 1):
            raise PrivacyError(
                "adaptive_clipping goes with a mechanism and microbatch_size=1; a query clips by "
                f"itself. Found query={queries.named(query)}, microbatch_size={microbatch_size}."
            )
        self._settings = _Settings(
            mechanism=mechanism,
            query=query,
            adaptive_clipping=adaptive_clipping,
            l2_norm_clip=(
                queries.plain_l2_norm_clip(query) if mechanism is None else mechanism.l2_norm_clip
            ),
            microbatch_size=_checks.positive_int("microbatch_size", microbatch_size),
            accumulation_steps=_checks.positive_int("accumulation_steps", accumulation_steps),
            chunk_size=chunk_size,
            noise_memory_bytes=noise_memory_bytes,
            pinned_seed=pinned_seed,
            # The noise of a norm that adapts has one coordinate more.
            identity=(
                queries.identity_of(query) if mechanism is None else _config.identity_of(mechanism)
            )
            ^ (2 * (adaptive_clipping is not None)),
            batch_size=_batch_size(batch_size, sampling, mechanism),
        )
        if adaptive_clipping is not None:
            assert mechanism is not None
            self._settings.quantile = QuantileNorm(adaptive_clipping, mechanism.l2_norm_clip)
        self._pending: list[np.ndarray] | None = None
        self._stream: NoiseStream | QueryNoise | None = None
        if sampling is not None:
            self.declare_sampling(sampling)
        elif not isinstance(mechanism, Mechanism):
            self._settings.sampling = UNCHECKED  # It promises nothing that could be broken.

    @property
    def mechanism(self) -> Mechanism | BareMechanism | None:
        """The mechanism whose noise is added; None if all that is known is a query."""
        return self._settings.mechanism

    @property
    def query(self) -> Any:
        """The DP query that makes noised sums; None if a mechanism does."""
        return self._settings.query

    @property
    def num_rounds(self) -> int | None:
        """Number of steps that are planned; None if a query does not say."""
        return None if self.mechanism is None else self.mechanism.num_rounds

    @property
    def l2_norm_clip(self) -> float | None:
        """Bound on the norm of one example's contribution; None if a query alone knows it.

        If the norm adapts it is the first one, to which all others are scaled before noise.
        """
        return self._settings.l2_norm_clip

    @property
    def current_l2_norm_clip(self) -> float | None:
        """What the next step clips to; it is computed from what earlier steps released."""
        adaptive = self._settings.adaptive
        return self.l2_norm_clip if adaptive is None else float(adaptive.threshold())

    @property
    def clip(self) -> Any:
        """What clips the contribution of an example; None until it is built, if it is no number."""
        if self._settings.quantile is not None:
            return self._settings.adaptive
        return self._stream if self.l2_norm_clip is None else self.l2_norm_clip

    @property
    def adaptive_clipping(self) -> AdaptiveClipping | None:
        """How the clip norm adapts; None: it does not."""
        return self._settings.adaptive_clipping

    def dp_event(self) -> Any:
        """Returns the `DpEvent` of all steps done, without amplification by sampling.

        `UnsupportedDpEvent` if a query does not say what it costs, or is not known to be right.
        """
        if self.query is None and isinstance(self.mechanism, Mechanism):
            sensitivity = self.mechanism.sensitivity.value
            return dp_accounting.GaussianDpEvent(self.mechanism.noise_multiplier / sensitivity)
        if isinstance(self._stream, QueryNoise):
            return self._stream.event(self.steps_done)
        return dp_accounting.UnsupportedDpEvent()

    @property
    def batch_size(self) -> float:
        """What sums of gradients are divided by."""
        if self._settings.batch_size is None:
            raise PrivacyError(
                "batch_size is not known: the mechanism does not say it. Give the optimizer "
                "batch_size=..., the expected number of examples in a batch."
            )
        return self._settings.batch_size

    @property
    def knows_batch_size(self) -> bool:
        """Whether anybody has said what sums of gradients are divided by."""
        return self._settings.batch_size is not None

    @property
    def microbatch_size(self) -> int:
        """Examples that are averaged before they are clipped."""
        return self._settings.microbatch_size

    @property
    def chunk_size(self) -> int | None:
        """Examples differentiated at once; None: as many as fit a memory budget."""
        return self._settings.chunk_size

    @property
    def accumulation_steps(self) -> int:
        """Calls of `apply_gradients` that make up one step."""
        return self._settings.accumulation_steps

    @property
    def sampling(self) -> SamplingScheme | str | None:
        """The scheme that was declared, `UNCHECKED`, or None."""
        return self._settings.sampling

    @property
    def noise_stream(self) -> NoiseStream | QueryNoise | None:
        """The stream of noise, or the state of the query; None until the optimizer is built."""
        return self._stream

    @property
    def steps_done(self) -> int:
        """Steps taken, those before a restore included."""
        return int(self.iterations.numpy())

    @property
    def most_steps_done(self) -> int:
        """The most steps that the run has come to in this process; more after a return."""
        return int(self._settings.taken.numpy()[0]) if self._stream is not None else 0

    @property
    def repeats_steps(self) -> bool:
        """Whether a return to an older state made this process take steps again, or is about to."""
        has_repeated = self._stream is not None and self._settings.taken.numpy()[1] > 0
        return has_repeated or self.steps_done < self.most_steps_done

    @property
    def pieces_done(self) -> tf.Variable | int:
        """Calls of `apply_gradients` since the last step, as a variable if there can be any."""
        return self._pieces if self._stream is not None and self.accumulation_steps > 1 else 0

    @property
    def exact_variables(self) -> list[tf.Variable]:
        """Variables with exact counts or sums of examples, which nothing that is trained reads."""
        if self._stream is None:
            return []
        pieces = [*self._totals, self._counts] if self.accumulation_steps > 1 else []
        return _compat.native([self._seen, self._settings.tally, *pieces])

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Makes the variables of the base optimizer and the noise stream.

        Later calls do nothing, and refuse other variables than those it was built for. Under a
        `tf.distribute` strategy call it in the strategy's scope before the first step.
        """
        if self._stream is not None:
            self._check_variables(var_list)
            return
        check_precision(var_list)
        super().build(var_list)
        settings = self._settings
        self._built_for = tuple(map(self._var_key, var_list))
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in var_list]
        self._stream = self._noise_for(specs)
        self._fingerprints = counter([settings.identity, 0], "fingerprints")
        self._seen = counter(list(Seen()), "seen")
        settings.expected = counter([*fresh_seed(), 0], "expected_batches")
        settings.taken = counter([0, 0], "steps_taken")
        settings.tally = counter([0, 0, 0], "tally")
        added = [self._fingerprints, self._seen, *self._stream.variables]
        if settings.quantile is not None:
            self._l2_norm_clip = shared_variable(settings.quantile.initial, "l2_norm_clip")
            settings.adaptive = AdaptiveNorm(settings.quantile, self._l2_norm_clip)
            added.append(self._l2_norm_clip)
        if settings.accumulation_steps > 1:
            self._pieces = counter(0, "pieces")
            self._counts = counter([0, 0, 0], "counts")
            if isinstance(self._stream, QueryNoise):
                self._totals = self._stream.make_totals()
                added += self._totals
            else:
                self._totals = [
                    self.add_variable_from_reference(v, "clipped_gradients") for v in var_list
                ]
                if settings.quantile is not None:
                    self._totals = [*self._totals, shared_variable(tf.zeros([]), "votes")]
                    added.append(self._totals[-1])
            added += [self._pieces, self._counts]
        # Keras's own files hold what is in this list.
        self._variables.extend(added)
        if self._pending is not None:
            self._assign_all(self._pending)
            self._pending = None

    def _noise_for(self, specs: list[tf.TensorSpec]) -> NoiseStream | QueryNoise:
        settings = self._settings
        if settings.query is not None:
            return QueryNoise(settings.query, specs)
        assert settings.mechanism is not None
        return NoiseStream(
            settings.mechanism.strategy,
            settings.mechanism.stddev,
            specs if settings.quantile is None else [*specs, VOTE_SPEC],
            block_memory_bytes=settings.noise_memory_bytes,
            pinned_seed=settings.pinned_seed,
        )

    def _check_variables(self, variables: Sequence[tf.Variable]) -> None:
        found = tuple(map(self._var_key, variables))
        if found != self._built_for:
            raise PrivacyError(
                "The trainable variables are not those that the noise was made for: give every "
                "model an optimizer of its own, and freeze layers before the first step. Found "
                f"{len(found)} variables, {len({*found} & {*self._built_for})} of them among the "
                f"{len(self._built_for)} expected."
            )

    def load_own_variables(self, store: Any) -> None:
        """Loads from a file of Keras; before the optimizer is built, as soon as it is."""
        values = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        if self._stream is None and values:
            self._pending = values
        elif len(values) == len(self._variables):
            self._assign_all(values)
        elif values:
            _LOGGER.warning(
                "The file holds %d variables of an optimizer and this one has %d; they were not "
                "loaded. If they belong to a private run, it cannot go on from here.",
                len(values),
                len(self._variables),
            )

    def _assign_all(self, values: list[np.ndarray]) -> None:
        fit = [
            tf.TensorShape(variable.shape).is_compatible_with(value.shape)
            for variable, value in zip(self._variables, values, strict=True)
        ]
        if not all(fit):
            _LOGGER.warning(
                "The variables of the optimizer in the file have other shapes than this "
                "optimizer's; they were not loaded. If they belong to a private run, it cannot go "
                "on from here."
            )
            return
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def __reduce__(self) -> Any:
        if self._stream is None:
            return super().__reduce__()
        raise BandMFTypeError(
            "A private optimizer cannot be copied or pickled once it has noise: two runs that "
            "share their past cost more than one. Make a new one, or save the model with "
            "model.save."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration with the whole mechanism in it, so that a model can be loaded.

        The noise is in the variables, not here.
        """
        _compat.refuse_old_hdf5()
        settings = self._settings
        return {
            **super().get_config(),
            **_config.encoded_source(
                self.mechanism, self.query, settings.identity, self.adaptive_clipping
            ),
            "batch_size": settings.batch_size,
            "sampling": settings.sampling if settings.sampling == UNCHECKED else None,
            "microbatch_size": settings.microbatch_size,
            "accumulation_steps": settings.accumulation_steps,
            "chunk_size": settings.chunk_size,
            "noise_memory_bytes": settings.noise_memory_bytes,
            "pinned_seed": settings.pinned_seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns the optimizer of a configuration."""
        return super().from_config(_config.decoded_source(config), custom_objects)


@dataclasses.dataclass
class _Settings:
    """What an optimizer was made with; an object of its own, so that Keras does not track it."""

    mechanism: Mechanism | BareMechanism | None
    query: Any
    l2_norm_clip: float | None
    microbatch_size: int
    accumulation_steps: int
    chunk_size: int | None
    noise_memory_bytes: int | None
    pinned_seed: int | None
    identity: int
    batch_size: float | None
    adaptive_clipping: AdaptiveClipping | None = None
    quantile: QuantileNorm | None = None
    adaptive: AdaptiveNorm | None = None  # Made with the stream.
    sampling: SamplingScheme | str | None = None
    sampling_run: SamplingScheme | None = None  # Of the pipeline that `fit` ran last.
    examples_per_user: int | None = None  # Of the same.
    pinned_sampling: bool = False
    is_expecting: bool = False
    is_applying: bool = False  # Whether noised gradients are on their way to the base optimizer.
    # The key of the seals of the pipeline that `fit` runs, or one that fits no seal, and whether
    # its seed is pinned; never saved, and made with the stream. So are the largest number of a step
    # that this process has taken, plus one, with how many steps it took again, and the numbers of
    # examples, of clipped ones and of non-finite ones.
    expected: Any = None
    taken: Any = None
    tally: Any = None

    @property
    def is_pinned(self) -> bool:
        """Whether anybody can reproduce the noise."""
        return self.pinned_seed is not None or getattr(self.query, "is_pinned", False)


class Seen(NamedTuple):
    """What a run has seen of its batches, by numbers of steps and of examples (microbatches)."""

    steps: Any = 0
    total: Any = 0
    smallest: Any = 0
    largest: Any = 0
    enforced: Any = 0  # Steps on the next batch of the pipeline that `fit` ran.
    pinned_noise: Any = 0
    pinned_sampling: Any = 0


def _checked_query(
    query: Any, microbatch_size: int, pinned_seed: int | None, noise_memory_bytes: int | None
) -> Mechanism | BareMechanism | None:
    """Returns the mechanism that is known of a query; refuses what does not go with it."""
    queries.check_interface(query)
    if pinned_seed is not None or noise_memory_bytes is not None:
        raise PrivacyError(
            "pinned_seed and noise_memory_bytes are for mechanisms; a query has its own seed and "
            "memory, so make the query with them."
        )
    if microbatch_size != 1 and queries.plain_l2_norm_clip(query) is None:
        raise PrivacyError(
            "microbatch_size must be 1 for a query that clips by itself: it takes a microbatch for "
            "one record, and one example can move that by twice its clip norm. Found "
            f"{microbatch_size}."
        )
    return queries.mechanism_of(query)


def counter(value: Any, name: str) -> tf.Variable:
    """Returns a variable of counts that all replicas share."""
    return shared_variable(tf.constant(value, tf.int64), name)


def shared_variable(value: Any, name: str) -> tf.Variable:
    """Returns a variable of which all replicas have the same value."""
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _batch_size(given: float | None, sampling: Any, mechanism: Any) -> float | None:
    if given is not None:
        return _checks.positive_float("batch_size", given)
    for source in (sampling, getattr(mechanism, "sampling", None)):
        if getattr(source, "batch_size", None) is not None:
            return float(source.batch_size)
    return None
