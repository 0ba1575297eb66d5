"""A planned mechanism beside the alternatives at the same privacy.

Every alternative is calibrated to the same (epsilon, delta) for zero-out neighbours and judged by
the same figure, its root mean squared error over the rounds of training at that noise:

    calibrated_rmse = noise_multiplier * sqrt(|A C^-1|_F^2 / n),    clip norm 1,

which does not depend on how a strategy is scaled. The alternatives are DP-SGD (independent noise,
amplified where batches are sampled), tree aggregation (online and full estimator), a BLT, MF (the
dense optimum), and for a BLT or an amplified plan also what BandMF achieves without sampling. All
of these but DP-SGD are held to one participation schema; amplification needs banded strategies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from bandmf_tf.accounting.random_participation import WaitingParticipation
from bandmf_tf.accounting.releases import Release
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import strategies, trees
from bandmf_tf.factorization.buffered import optimize_buffered
from bandmf_tf.factorization.dense_optimization import optimize_dense
from bandmf_tf.factorization.optimization import (
    OptimizationResult,
    ProgressCallback,
    optimize_banded,
    optimize_banded_fixed_epochs,
)
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, Participation
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.factorization.workloads import Workload

# Called with the stage of the work (`planner.STAGES`) and a detail, which may be empty.
Progress = Callable[[str, str], None]

# The dense optimum costs O(n^3) an iteration: seconds up to here, minutes at 2,000 rounds.
LARGEST_DENSE = 600

# Unless it was asked for, it gets so many iterations times n^3, which is about ten seconds.
_DENSE_WORK = 1.5e10

# A picture and a ratio need no more digits than this.
_TOLERANCE = 1e-3

# Free column norms converge slowly: with many rounds, a third of a percent more (with momentum 1.5)
# than the least error, which is less than with equal norms, takes a third of the time.
_LONG_TOLERANCE = 3e-2

# How far the loss of a dense strategy may be above a lower bound on all of them, in relative terms.
_LARGEST_GAP = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Alternative:
    """One mechanism of a comparison, calibrated to its (epsilon, delta).

    Attributes:
      strategy: Key of the strategy, as in `plan.STRATEGIES`.
      name: Name to show.
      rows_in_memory: Rows of noise, each the size of the model, that training keeps.
      setting: What its privacy rests on, in a few words.
      calibrated_rmse: Root mean squared error at the calibrated noise, clip norm 1.
      round_errors: The same for every round: the standard deviation of the error of A x in one
        coordinate.
    """

    strategy: str
    name: str
    rows_in_memory: int
    setting: str
    calibrated_rmse: float
    round_errors: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The alternatives to a plan at the same privacy.

    Attributes:
      participation: What units may do in the alternatives without sampling.
      alternatives: Those that were computed.
      left_out: A sentence for each that was not.
    """

    participation: Participation
    alternatives: tuple[Alternative, ...]
    left_out: tuple[str, ...]


def compare(
    workload: Workload,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    planned: str,
    sampling: SamplingScheme | None = None,
    banded_num_bands: int | None = None,
    include_dense: bool | None = None,
    progress: Progress = lambda stage, detail: None,
) -> Comparison:
    """Returns the alternatives to a plan.

    Args:
      workload: The workload A.
      participation: What units may do where batches are not sampled.
      epsilon: Target of all alternatives.
      delta: Target of all alternatives.
      planned: Key of the planned strategy, which is not computed again.
      sampling: How DP-SGD draws batches, if the plan is amplified.
      banded_num_bands: With this many bands BandMF without sampling is an alternative; None leaves
        it out.
      include_dense: Whether to optimise the dense strategy; None decides by its size.
      progress: Called before every alternative.
    """
    n = workload.num_rounds
    alternatives: list[Alternative] = []
    left_out: list[str] = []

    def add(key: str, name: str, release: Release) -> None:
        noise_multiplier = release.noise_multiplier(epsilon, delta)
        alternatives.append(alternative(key, name, workload, release, noise_multiplier))

    def add_unamplified(key: str, name: str, make: Callable[[], Strategy]) -> None:
        progress("comparing", name)
        strategy = make()
        sharper = None
        if key == "tree_online" and n <= LARGEST_DENSE:
            # What is released is less sensitive than the nodes, whose figure is the classic one.
            sharper = participation.sensitivity(trees.TreeStrategy(n, "online").released())
        add(key, name, Release(strategy, participation, stated_sensitivity=sharper))

    if planned != "identity":
        if sampling is None:
            add_unamplified("identity", "DP-SGD", lambda: strategies.identity(n))
        else:
            progress("comparing", "DP-SGD")
            release = Release(strategies.identity(n), sampling.participation, sampling)
            add("identity", "DP-SGD", release)
    if banded_num_bands is not None:
        add_unamplified(
            "banded",
            f"BandMF ({banded_num_bands:,} band{'' if banded_num_bands == 1 else 's'})",
            lambda: banded_optimum(workload, banded_num_bands, participation),
        )
    if planned != "blt":
        progress("comparing", "BLT")
        blt = optimize_buffered(workload, None, participation).strategy
        buffers = max(1, blt.rows_in_memory)  # One round keeps nothing, and has a buffer.
        name = f"BLT ({buffers} buffer{'' if buffers == 1 else 's'})"
        add_unamplified("blt", name, lambda: blt)
    for estimator, name in (("online", "TreeAgg (online)"), ("full", "OptTreeAgg (full)")):
        if planned != f"tree_{estimator}":
            make = functools.partial(trees.TreeStrategy, n, estimator)
            add_unamplified(f"tree_{estimator}", name, make)
    if planned != "dense":
        if include_dense or (include_dense is None and n <= LARGEST_DENSE):
            try:
                optimum = functools.partial(
                    dense_optimum,
                    workload,
                    participation,
                    None if include_dense else math.ceil(_DENSE_WORK / n**3),
                    lambda i, _: progress("comparing", f"MF (dense), iteration {i}"),
                )
                add_unamplified("dense", "MF (dense)", optimum)
            except NotOptimalError as error:
                left_out.append(f"MF (dense): {error}")
        else:
            left_out.append(
                f"MF (dense): its O(n^3) optimisation is left out above {LARGEST_DENSE} rounds "
                "unless asked for (--compare_dense)."
            )
    return Comparison(participation, tuple(alternatives), tuple(left_out))


def alternative(
    key: str,
    name: str,
    workload: Workload,
    release: Release,
    noise_multiplier: float,
    *,
    is_amplified: bool = True,
) -> Alternative:
    """Returns the error of a release, its strategy as it is scaled, at `noise_multiplier`."""
    variances = release.strategy.round_variances(workload)
    return Alternative(
        strategy=key,
        name=name,
        rows_in_memory=release.strategy.rows_in_memory,
        setting=_setting(release, is_amplified),
        calibrated_rmse=noise_multiplier * math.sqrt(float(np.mean(variances))),
        round_errors=noise_multiplier * np.sqrt(variances),
    )


def _setting(release: Release, is_amplified: bool) -> str:
    if release.sampling is None or not is_amplified:
        sampling = "no sampling" if release.sampling is None else "not amplified"
        return f"{sampling}, {release.sensitivity.kind} sensitivity"
    separation = release.sampling.min_separation
    if isinstance(release.sampling, WaitingParticipation):
        return f"amplified, examples in random rounds at least {separation} apart"
    source = "the whole data set" if separation == 1 else f"{separation} parts in turn"
    return f"amplified, batches sampled from {source}"


def banded_optimum(workload: Workload, num_bands: int, participation: Participation) -> Strategy:
    """Returns the best banded strategy; free column norms help in rounds exactly b apart."""
    if isinstance(participation, FixedEpochs) and num_bands <= participation.min_separation:
        apart = participation.min_separation
        tolerance = _TOLERANCE if workload.num_rounds <= LARGEST_DENSE else _LONG_TOLERANCE
        return optimize_banded_fixed_epochs(
            workload, num_bands, apart, tolerance=tolerance
        ).strategy
    return optimize_banded(workload, num_bands, tolerance=_TOLERANCE).strategy


def dense_optimum(
    workload: Workload,
    participation: Participation,
    max_iterations: int | None = None,
    progress: ProgressCallback | None = None,
) -> Strategy:
    """Returns the dense optimum; equal column norms help where rounds are not exactly b apart."""
    if workload.num_rounds == 1:
        return strategies.identity(1)  # There is no other; LAPACK's eigensolver refuses 1 x 1.
    outcome = optimize_dense(
        workload,
        min(participation.separation(workload.num_rounds), workload.num_rounds),
        equal_column_norms=participation.schema == MinSeparation.schema,
        tolerance=_TOLERANCE,
        max_iterations=max_iterations,
        progress=progress,
    )
    require_optimum(outcome)
    return outcome.strategy


class NotOptimalError(BandMFError):
    """An optimiser has not found what would have to be compared, or used."""


def require_optimum(outcome: OptimizationResult) -> None:
    """Raises `NotOptimalError` if a dense strategy is not what its name promises."""
    gap = outcome.duality_gap
    if gap is None or not gap <= _LARGEST_GAP:
        raise NotOptimalError(
            f"the dense optimum was not found in {outcome.iterations} iterations: the loss may be "
            f"{gap:.2g} above it, in relative terms, and {_LARGEST_GAP:g} is accepted; use another "
            "strategy, such as banded."
        )
