"""Plans: what a mechanism is planned for, and what came out of it.

Scaling. `rmse` is the paper's sqrt(L(B, C) / n) at sigma = 1 for the strategy scaled to sensitivity
1 under the plan's participation, and `noise_multiplier` is relative to that strategy. Their product
`calibrated_rmse` does not depend on the scaling.

Without sampling the participation of the request is what the guarantee assumes. With sampling
(amplification) the guarantee rests on how batches are drawn, see `amplification.py`, and the
participation only fixes the scale of the strategy: the request's if it has one, as in the paper's
tables, otherwise what the sampling itself can do.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div, exactly, round_up
from bandmf_tf.accounting.amplification import (
    BoundedPoissonSampling,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.accounting.random_participation import (
    BallsInBins,
    MinSeparationSampling,
    OncePerEpoch,
    RandomParticipation,
    SecretParts,
)
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.buffered import checked_num_buffers
from bandmf_tf.factorization.optimization import OptimizationResult
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    Participation,
    SingleParticipation,
)
from bandmf_tf.factorization.sensitivity import EXACT, Sensitivity
from bandmf_tf.factorization.workloads import Workload
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.planning.bands import BandSearch
from bandmf_tf.planning.comparison import Alternative, Comparison
from bandmf_tf.planning.frontier import BYTES_PER_ENTRY, Frontier

# Strategies by name; the first three have a number of bands to choose, those with a banded inverse
# one of its bands, BLTs one of buffers.
BANDED_STRATEGIES = ("banded", "toeplitz", "square_root")
INVERSE_STRATEGIES = ("inverse_banded", "inverse_square_root")
STRATEGIES = (
    *BANDED_STRATEGIES,
    "blt",
    *INVERSE_STRATEGIES,
    "identity",
    "tree_full",
    "tree_online",
    "dense",
)
STRATEGY_NAMES = {
    "banded": "BandMF",
    "toeplitz": "BandToep",
    "square_root": "Banded square root",
    "blt": "BLT",
    "inverse_banded": "Banded inverse",
    "inverse_square_root": "BISR",
    "identity": "DP-SGD",
    "tree_full": "OptTreeAgg (full)",
    "tree_online": "TreeAgg (online)",
    "dense": "MF (dense)",
}

# How batches are drawn, by name, and what that takes, of which `keras.make_batches` does all.
SAMPLINGS = {
    PoissonSampling.kind: "parts of equal size in turn, each example with some probability",
    FixedSizeSampling.kind: "parts of equal size in turn, a batch of one size at random",
    Shuffling.kind: "parts of equal size in turn, each shuffled anew for every pass",
    SecretParts.kind: "parts of random size, kept secret, in turn, as with poisson",
    MinSeparationSampling.kind: "each example at random, when its last batch is long enough ago",
    OncePerEpoch.kind: "each example in one random round of every epoch, some rounds apart",
    BallsInBins.kind: "bins of random size, kept secret, in turn, each as one batch",
}
AUTO_SAMPLING = "auto"

# Beyond these the accounting runs out of double precision, long after privacy has run out.
_LARGEST_EPSILON = 1e5
_SMALLEST_NOISE = 1e-3

# An alternative that is better by less than this is not worth a caution.
_NOTICEABLE = 0.005

# A hint is due where so much of the memory is enough for an error that is larger by so much.
_LITTLE_MEMORY = 0.1
_LITTLE_ERROR = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """What a plan is made for. Exactly one of `epsilon` and `noise_multiplier` is given.

    Attributes:
      workload: The workload A; its length is the number of rounds.
      delta: Delta of the guarantee.
      epsilon: Target epsilon; the noise is calibrated to it.
      noise_multiplier: Noise over clip norm for the strategy as it is scaled; epsilon follows.
      column_norm: Largest column norm to which the strategy is scaled; None scales it to
        sensitivity 1.
      l2_norm_clip: Clip norm of one unit's contribution to one round.
      participation: In which rounds a unit may contribute. None stands for a single participation
        without sampling, and for what the sampling can do with it.
      batch_size: Examples in a batch. With `dataset_size`, epsilon is amplified by sampling.
      dataset_size: Examples in the data set.
      sampling: How batches are drawn: one of `SAMPLINGS`, or "auto" for the one of least error.
      strategy: One of `STRATEGIES`.
      num_bands: Number of bands of a banded strategy, or of a banded inverse; None chooses it.
      num_buffers: Number of buffers of a BLT; None chooses it.
      memory_per_parameter: Bytes that the noise may take for every parameter of the model. With it
        the strategy and its size are chosen, the best that fit; leave them out.
      equal_column_norms: False is the appendix variant for (k, b)-participation (strategies
        "banded" and "dense").
      tolerance: Where the optimiser stops, relative to the loss; the default costs 0.01 to 0.1 %
        of the error (`factorization.optimize_banded` says more).
      compare_dense: Whether to compare with dense MF; None decides by the number of rounds.
    """

    workload: Workload
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    column_norm: float | None = None
    l2_norm_clip: float = 1.0
    participation: Participation | None = None
    batch_size: int | None = None
    dataset_size: int | None = None
    sampling: str = "poisson"
    strategy: str = "banded"
    num_bands: int | None = None
    num_buffers: int | None = None
    memory_per_parameter: float | None = None
    equal_column_norms: bool = True
    tolerance: float = 2e-4
    compare_dense: bool | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_participation()
        self._check_sampling()
        self._check_strategy()

    @property
    def num_rounds(self) -> int:
        """Number of rounds n."""
        return self.workload.num_rounds

    @property
    def is_sampled(self) -> bool:
        """Whether epsilon is amplified by sampling."""
        return self.batch_size is not None

    @property
    def most_rows(self) -> int | None:
        """How many rows of noise `memory_per_parameter` holds."""
        if self.memory_per_parameter is None:
            return None
        return int(self.memory_per_parameter // BYTES_PER_ENTRY)

    @property
    def weighs_bands(self) -> bool:
        """Whether more bands cost noise: of sampled batches, all but shuffled ones."""
        return self.is_sampled and self.sampling != Shuffling.kind

    def sampling_scheme(self, num_parts: int) -> SamplingScheme:
        """Returns how batches are drawn if examples are so many rounds apart.

        Bins are as many as the data set has batches, whatever that number, and so are the rounds of
        an epoch.
        """
        assert self.batch_size is not None
        assert self.dataset_size is not None
        n, most = self.num_rounds, self.dataset_size // self.batch_size
        sizes = (n, num_parts, self.batch_size, self.dataset_size)
        if self.sampling == PoissonSampling.kind:
            return BoundedPoissonSampling.from_sizes(*sizes)
        if self.sampling == FixedSizeSampling.kind:
            return FixedSizeSampling(*sizes)
        if self.sampling == Shuffling.kind:
            return Shuffling(*sizes, reshuffled=True)
        if self.sampling == BallsInBins.kind:
            return BallsInBins(n, most)
        if num_parts > most:
            raise BandMFError(
                f"num_bands must be at most dataset_size / batch_size={most} with "
                f"sampling={self.sampling}, as many rounds as examples can be apart. Found "
                f"{num_parts}."
            )
        if self.sampling == SecretParts.kind:
            return SecretParts(n, num_parts, num_parts * self.batch_size / self.dataset_size)
        if self.sampling == OncePerEpoch.kind:
            return OncePerEpoch(n, num_parts, most)
        rate = min(self.batch_size / self.dataset_size, 1 / num_parts)
        return MinSeparationSampling.from_rate(n, num_parts, rate)

    def unsampled_participation(self) -> Participation:
        """Returns what units do in a run without sampling, on the same data and batches.

        Without a participation of its own, a run with batches of known size goes through the data
        set in a fixed order, so that a unit comes up every floor(dataset_size / batch_size) rounds,
        exactly: what does not fill a batch sits out, as in `keras.cyclic_scheme`.
        """
        if self.participation is not None:
            return self.participation
        if self.batch_size is None or self.dataset_size is None:
            return SingleParticipation()
        b, n = self.dataset_size // self.batch_size, self.num_rounds
        return FixedEpochs(b, ceil_div(n, b)) if b < n else SingleParticipation()

    def _check_numbers(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            found = "neither" if self.epsilon is None else "both"
            raise BandMFError(
                f"Exactly one of epsilon (to calibrate the noise) and noise_multiplier (to compute "
                f"epsilon) must be given. Found {found}."
            )
        for name in (
            "epsilon",
            "noise_multiplier",
            "column_norm",
            "l2_norm_clip",
            "tolerance",
            "memory_per_parameter",
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _checks.positive_float(name, value))
        if self.epsilon is not None and self.epsilon > _LARGEST_EPSILON:
            raise BandMFError(
                f"epsilon must be at most {exactly(_LARGEST_EPSILON)}; a larger one protects "
                f"nobody. Found {exactly(self.epsilon)}."
            )
        if self.noise_multiplier is not None and self.noise_multiplier < _SMALLEST_NOISE:
            raise BandMFError(
                f"noise_multiplier must be at least {_SMALLEST_NOISE:g}; less noise protects "
                f"nobody. Found {exactly(self.noise_multiplier)}."
            )
        _checks.probability("delta", self.delta)

    def _check_participation(self) -> None:
        separation = self.participation.min_separation if self.participation else None
        if separation is not None and separation > self.num_rounds:
            raise BandMFError(
                f"min_separation must be at most num_rounds={self.num_rounds}, which means a "
                f"single participation. Found {separation}."
            )

    def _check_sampling(self) -> None:
        if self.sampling not in (*SAMPLINGS, AUTO_SAMPLING):
            raise BandMFError(
                f"sampling must be one of {', '.join((*SAMPLINGS, AUTO_SAMPLING))}. Found "
                f"{self.sampling!r}."
            )
        if (self.batch_size is None) != (self.dataset_size is None):
            raise BandMFError(
                "batch_size and dataset_size must be given together, for amplification by "
                f"sampling, or not at all. Found batch_size={self.batch_size}, "
                f"dataset_size={self.dataset_size}."
            )
        if self.batch_size is None:
            if self.sampling == AUTO_SAMPLING:
                raise BandMFError(
                    "sampling=auto needs to know how many examples there are; give batch_size and "
                    "dataset_size."
                )
            return
        _checks.positive_int("batch_size", self.batch_size)
        _checks.positive_int("dataset_size", self.dataset_size)
        assert self.dataset_size is not None
        if self.batch_size > self.dataset_size:
            raise BandMFError(
                f"batch_size must be at most dataset_size={self.dataset_size}. Found "
                f"{self.batch_size}."
            )
        in_bins = self.sampling == BallsInBins.kind
        if self.strategy not in (*BANDED_STRATEGIES, "identity", *(["blt"] if in_bins else [])):
            raise BandMFError(
                f"Amplification needs a banded strategy, which {self.strategy} is not; leave out "
                "batch_size and dataset_size or use strategy=banded, or strategy=blt with "
                f"sampling={BallsInBins.kind}."
            )
        if not self.equal_column_norms:
            raise BandMFError(
                "Amplification pays for the largest column norm; keep equal_column_norms=true or "
                "leave out batch_size and dataset_size."
            )
        if self.noise_multiplier is not None and self.sampling == AUTO_SAMPLING:
            raise BandMFError(
                "sampling=auto compares errors at a target epsilon; give epsilon instead of "
                "noise_multiplier, or name the sampling."
            )
        if self.noise_multiplier is not None and self._chooses_bands and self.weighs_bands:
            raise BandMFError(
                "With amplification the best num_bands depends on a target epsilon; give num_bands "
                "beside noise_multiplier, or epsilon instead of it."
            )

    @property
    def _chooses_bands(self) -> bool:
        return self.strategy in BANDED_STRATEGIES and self.num_bands is None

    def _check_strategy(self) -> None:
        if self.strategy not in STRATEGIES:
            raise BandMFError(
                f"strategy must be one of {', '.join(STRATEGIES)}. Found {self.strategy!r}."
            )
        if self.memory_per_parameter is not None and (
            self.strategy != "banded"
            or self.num_bands is not None
            or self.num_buffers is not None
            or not self.equal_column_norms
        ):
            raise BandMFError(
                "memory_per_parameter chooses the strategy and its size; leave out strategy, "
                "num_bands, num_buffers and equal_column_norms, or memory_per_parameter. Found "
                f"strategy={self.strategy}, num_bands={self.num_bands}, "
                f"num_buffers={self.num_buffers}, equal_column_norms={self.equal_column_norms}."
            )
        if self.num_buffers is not None:
            checked_num_buffers(self.num_buffers)
            if self.strategy != "blt":
                raise BandMFError(
                    f"num_buffers is for strategy=blt; leave it out for strategy={self.strategy}. "
                    f"Found {self.num_buffers}."
                )
        if not self.equal_column_norms and self.strategy not in ("banded", "dense"):
            raise BandMFError(
                "equal_column_norms=false is for strategy=banded and strategy=dense. Found "
                f"strategy={self.strategy}."
            )
        if self.num_bands is None:
            return
        with_bands = (*BANDED_STRATEGIES, *INVERSE_STRATEGIES)
        if self.strategy not in with_bands:
            raise BandMFError(
                f"num_bands is for the strategies {', '.join(with_bands)}; leave it out for "
                f"strategy={self.strategy}. Found {self.num_bands}."
            )
        _checks.num_bands(self.num_bands, self.num_rounds)
        separation = self.unsampled_participation().separation(self.num_rounds)
        if not self.equal_column_norms and self.num_bands > separation:
            raise BandMFError(
                "Without equal column norms num_bands must be at most "
                f"min_separation={separation}, so that the participations of a unit do not "
                f"interact. Found {self.num_bands}."
            )
        if self.is_sampled and self.sampling != AUTO_SAMPLING:
            self.sampling_scheme(self.num_bands)  # Checks that a batch fits into a part.


@dataclasses.dataclass(frozen=True)
class SamplingChoice:
    """What one way of drawing batches leads to at the target, or why it does not.

    Attributes:
      sampling: One of `SAMPLINGS`.
      needs: What that takes, in words.
      plan: Strategy and size in words, or why there is no plan.
      rmse: Root mean squared error at the target and clip norm 1; None without a plan.
      noise_multiplier: For the strategy scaled to columns of norm 1.
      rows_in_memory: Rows of noise that training keeps.
      confidence: How sure the figure is: "proven", or by which samples.
      cpu_seconds: What it took to find out.
    """

    sampling: str
    needs: str
    plan: str
    rmse: float | None
    noise_multiplier: float | None
    rows_in_memory: int | None
    confidence: str | None
    cpu_seconds: float

    def describe(self) -> str:
        """Returns the choice in words."""
        if self.rmse is None or self.noise_multiplier is None:
            return f"not planned: {self.plan}"
        return (
            f"RMSE {self.rmse:.4g} by {self.plan}, noise multiplier "
            f"{round_up(self.noise_multiplier):g} for columns of norm 1, {self.confidence}, "
            f"{self.cpu_seconds:.0f} CPU s; takes {self.needs}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A planned mechanism with how it was found and how it compares.

    Attributes:
      request: What was asked for.
      mechanism: The mechanism, strategy scaled and noise calibrated.
      participation: The schema under which the strategy has sensitivity 1. Without sampling it is
        the mechanism's own.
      sensitivity: Of the mechanism's strategy under `participation`: 1, and why.
      rmse: The paper's sqrt(L(B, C) / n) at sigma = 1, for the strategy of sensitivity 1.
      size_reason: Why the strategy has this number of bands or buffers, in a sentence.
      band_search: What was tried, if the number of bands was searched for.
      frontier: Error against memory, if the strategy was chosen for a budget of memory.
      memory_per_parameter: Bytes that the noise may take for every parameter of the model, if that
        was said; the request is for what was chosen for it.
      optimization: Where the optimiser stopped; None for closed forms. Its loss is for the
        optimiser's own normalisation.
      planned: The plan itself as an entry of the comparison.
      comparison: The alternatives at the same privacy.
      samplings: What every way of drawing batches leads to, if that was left open.
    """

    request: PlanRequest
    mechanism: Mechanism
    participation: Participation
    sensitivity: Sensitivity
    rmse: float
    size_reason: str
    band_search: BandSearch | None
    frontier: Frontier | None
    memory_per_parameter: float | None
    optimization: OptimizationResult | None
    planned: Alternative
    comparison: Comparison
    samplings: tuple[SamplingChoice, ...] = ()

    @property
    def name(self) -> str:
        """Name of the strategy to show."""
        return STRATEGY_NAMES[self.request.strategy]

    @property
    def num_rounds(self) -> int:
        """Number of rounds n."""
        return self.mechanism.num_rounds

    @property
    def num_bands(self) -> int:
        """Number of bands of the strategy."""
        return self.mechanism.num_bands

    @property
    def num_buffers(self) -> int | None:
        """Number of buffers of a BLT; None for other strategies."""
        return getattr(self.mechanism.strategy, "num_buffers", None)

    @property
    def num_inverse_bands(self) -> int | None:
        """Number of bands of C^-1, if that is what the strategy has; None for others."""
        return self.rows_in_memory + 1 if self.request.strategy in INVERSE_STRATEGIES else None

    @property
    def size(self) -> str:
        """The number of bands or buffers in words."""
        count, noun = self.num_buffers or self.num_bands, "buffer" if self.num_buffers else "band"
        of = ""
        if self.num_inverse_bands is not None:
            count, of = self.num_inverse_bands, " of the inverse"
        return f"{count:,} {noun}{'' if count == 1 else 's'}{of}"

    @property
    def calibrated_rmse(self) -> float:
        """Root mean squared error at the planned noise and clip norm 1."""
        return self.planned.calibrated_rmse

    @property
    def min_separation(self) -> int:
        """Its b under `participation`; the number of rounds for a single participation."""
        return self.participation.separation(self.num_rounds)

    @property
    def max_participations(self) -> int:
        """How often a unit can take part under `participation`: its cap, or what b allows."""
        return self.participation.most(self.num_rounds)

    @property
    def max_column_norm(self) -> float:
        """Largest column norm of the strategy, on which amplification rests."""
        return self.mechanism.release.max_column_norm

    @property
    def unit_noise_multiplier(self) -> float:
        """Noise over clip norm for the strategy scaled to columns of norm 1, as in DP-SGD."""
        return self.mechanism.noise_multiplier / self.max_column_norm

    @property
    def rho_note(self) -> str:
        """What the mechanism's rho is a statement about."""
        if self.mechanism.sampling is None:
            return "rho-zCDP for the participation that is assumed, zero-out neighbours"
        return (
            "rho-zCDP WITHOUT amplification, for all that the sampling can do: "
            f"{self.mechanism.participation.describe()}; sampling does not lower rho"
        )

    @property
    def sensitivity_note(self) -> str:
        """Which participation the plan's sensitivity is for, and what that means for privacy."""
        if self.mechanism.sampling is None:
            return "for the participation that is assumed"
        schema = f"if {self.participation.describe()}"
        if self.request.participation is None:
            return f"{schema}, which is all that the sampling can do"
        return (
            f"{schema}; with sampling this only fixes the scale of the strategy, and the guarantee "
            "is for all that the sampling can do, where it is "
            f"{round_up(self.mechanism.sensitivity.value, 6):g}"
        )

    @property
    def rows_in_memory(self) -> int:
        """Noise rows, each the size of the model, that training keeps between two rounds."""
        return self.mechanism.strategy.rows_in_memory

    @property
    def bytes_per_parameter(self) -> int:
        """Memory that training needs for these rows, for every parameter of the model."""
        return self.rows_in_memory * BYTES_PER_ENTRY

    def cautions(self) -> tuple[str, ...]:
        """Returns what the reader of a plan should not overlook."""
        found = []
        if self.optimization is not None and not self.optimization.converged:
            found.append(
                "The optimiser stopped at its iteration limit; privacy is not affected, the error "
                "may be a little above the optimum."
            )
        if self.sensitivity.kind != EXACT:
            found.append(
                "The sensitivity is an upper bound: the guarantee holds, with more noise than an "
                "exact value might need."
            )
        if isinstance(self.mechanism.sampling, RandomParticipation) and (
            not self.mechanism.is_amplified
        ):
            found.append(
                f"sampling={self.request.sampling} gains nothing here: epsilon is that without "
                "amplification. Fewer bands, another sampling or a larger delta may gain."
            )
        dataset_size = self.request.dataset_size
        if dataset_size is not None and self.mechanism.delta >= 1.0 / dataset_size:
            found.append(
                f"delta={exactly(self.mechanism.delta)} is not below 1 / "
                f"dataset_size={1.0 / dataset_size:.3g}; such a delta allows revealing a whole "
                "record."
            )
        most = math.inf if self.memory_per_parameter is None else self.memory_per_parameter
        fitting = (
            entry
            for entry in self.comparison.alternatives
            if entry.rows_in_memory * BYTES_PER_ENTRY <= most
        )
        best = min((self.planned, *fitting), key=lambda entry: entry.calibrated_rmse)
        gain = 1.0 - best.calibrated_rmse / self.calibrated_rmse
        if gain > _NOTICEABLE:
            found.append(f"{best.name} has {gain:.1%} less error at the same privacy.")
        return tuple(found)

    def hints(self) -> tuple[str, ...]:
        """Returns what would be cheaper, if nobody has said what the noise may cost."""
        if self.memory_per_parameter is not None:
            return ()
        little = [
            entry
            for entry in self.comparison.alternatives
            if entry.rows_in_memory <= _LITTLE_MEMORY * self.rows_in_memory
            and entry.rows_in_memory < self.rows_in_memory  # Nothing is cheaper than nothing.
            and entry.calibrated_rmse < (1.0 + _LITTLE_ERROR) * self.calibrated_rmse
        ]
        if not little:
            return ()
        best = min(little, key=lambda entry: entry.calibrated_rmse)
        more = best.calibrated_rmse / self.calibrated_rmse - 1.0
        change = f"{more:.1%} more" if more > 0.0 else "no more"
        hint = (
            f"{best.name} has {change} error and keeps {best.rows_in_memory} rows of noise where "
            f"this plan keeps {self.rows_in_memory:,}; strategy={best.strategy} plans it, and "
            "memory_per_parameter chooses the best strategy for a memory."
        )
        return (hint,)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain values, under the names of the flags."""
        mechanism, guarantee = self.mechanism, self.mechanism.guarantee
        return {
            "num_rounds": self.num_rounds,
            "num_bands": self.num_bands,
            "num_bands_reason": self.size_reason,
            "num_buffers": self.num_buffers,
            "num_inverse_bands": self.num_inverse_bands,
            "strategy": self.request.strategy,
            "equal_column_norms": self.request.equal_column_norms,
            "workload": self.request.workload.describe(),
            "participation": self.participation.schema,
            "min_separation": self.min_separation,
            "max_participations": self.max_participations,
            "rmse": self.rmse,
            "sensitivity": self.sensitivity.value,
            "sensitivity_kind": self.sensitivity.kind,
            "sensitivity_theorem": self.sensitivity.theorem,
            "sensitivity_note": self.sensitivity_note,
            "max_column_norm": self.max_column_norm,
            "noise_multiplier": mechanism.noise_multiplier,
            "l2_norm_clip": mechanism.l2_norm_clip,
            "noise_stddev": mechanism.stddev,
            "calibrated_rmse": self.calibrated_rmse,
            "epsilon": guarantee.epsilon,
            "delta": guarantee.delta,
            "rho": guarantee.rho,
            "rho_note": self.rho_note,
            "adjacency": str(guarantee.adjacency.value),
            "accounting": guarantee.accounting,
            "assumptions": list(guarantee.assumptions),
            "sampling": self._sampling_json(),
            "bytes_per_parameter": self.bytes_per_parameter,
            "memory_per_parameter": self.memory_per_parameter,
            "frontier": None if self.frontier is None else self.frontier.to_json(),
            "optimization": self._optimization_json(),
            "num_bands_tried": self._search_json(),
            "samplings": [dataclasses.asdict(entry) for entry in self.samplings] or None,
            "comparison": [
                {
                    "strategy": entry.strategy,
                    "name": entry.name,
                    "setting": entry.setting,
                    "bytes_per_parameter": entry.rows_in_memory * BYTES_PER_ENTRY,
                    "calibrated_rmse": entry.calibrated_rmse,
                    "relative_to_plan": entry.calibrated_rmse / self.calibrated_rmse,
                }
                for entry in (self.planned, *self.comparison.alternatives)
            ],
            "comparison_participation": self.comparison.participation.describe(),
            "comparison_left_out": list(self.comparison.left_out),
            "cautions": list(self.cautions()),
            "hints": list(self.hints()),
        }

    def _sampling_json(self) -> dict[str, Any] | None:
        scheme = self.mechanism.sampling
        if scheme is None:
            return None
        return {
            "scheme": self.request.sampling,
            "batch_size": self.request.batch_size,
            "dataset_size": self.request.dataset_size,
            "num_parts": scheme.min_separation,
            "sampling_probability": getattr(scheme, "sampling_probability", None),
            "epoch_rounds": getattr(scheme, "epoch_rounds", None),
            "rounds_per_part": scheme.rounds_per_part,
            "max_participations": scheme.max_participations,
            "max_batch_size": getattr(scheme, "max_batch_size", None),
            "sensitivity": self.mechanism.sensitivity.value,
            "sensitivity_kind": self.mechanism.sensitivity.kind,
        }

    def _optimization_json(self) -> dict[str, Any] | None:
        if self.optimization is None:
            return None
        outcome = self.optimization
        return {
            "converged": bool(outcome.converged),
            "iterations": int(outcome.iterations),
            "relative_change": _finite(outcome.relative_change),
            "gradient_norm": _finite(outcome.gradient_norm),
            "duality_gap": _finite(outcome.duality_gap),
            "guarantee": outcome.guarantee,
        }

    def _search_json(self) -> list[dict[str, Any]] | None:
        if self.band_search is None:
            return None
        keys = ("num_bands", "sampling_probability", "compositions", "rmse")
        return [{key: getattr(entry, key) for key in keys} for entry in self.band_search.tried]


def _finite(value: float | None) -> float | None:
    """Returns the value, or None (null in JSON) where it is not a finite number."""
    return float(value) if value is not None and math.isfinite(value) else None
