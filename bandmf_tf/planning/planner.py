"""Planning: from what a training run looks like to a calibrated mechanism.

`plan_mechanism` chooses the number of bands if that is left open, optimises the strategy for the
workload, scales it to sensitivity 1 under a participation schema, calibrates the noise, and
compares the result with the alternatives at the same privacy. It is pure computation: no files, no
output, no TensorFlow.

Choosing a strategy. With a budget of memory the best strategy that fits is taken, see `frontier.py`
(with sampling, which needs bands, the best number of bands that fits). Without one it is BandMF
unless another strategy is asked for. Balls in bins need no bands: there the better one of BandMF
and a BLT is taken. BISR is never chosen: its optimised form is always better.

Choosing bands. Without sampling the choice is `num_bands = min_separation`: among strategies of the
same sensitivity more bands mean less error, and this is the largest number for which the
participations of a unit do not interact, so that the sensitivity is exact and no larger than that
of independent rounds (Theorem 2). Training keeps num_bands - 1 rows of noise, each the size of the
model; fewer bands trade error for memory. With sampling the number of bands is also the number of
parts of the data set, and `bands.py` weighs the two effects. Where samples certify no epsilon, the
noise is that without amplification. Poisson samples get a largest size, so that batches are not
mostly padding; it costs a thousandth of epsilon at most. The bands of a banded inverse are doubled
as long as that lowers the error by a hundredth, as a BLT's buffers are added.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.accounting.amplification import BoundedPoissonSampling, FixedSizeSampling
from bandmf_tf.accounting.certificates import Certificate, NotCertifiedError
from bandmf_tf.accounting.gaussian import gaussian_noise_multiplier
from bandmf_tf.accounting.random_participation import BallsInBins, RandomParticipation
from bandmf_tf.accounting.releases import Release
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import error, optimization, strategies, trees
from bandmf_tf.factorization.buffered import optimize_buffered
from bandmf_tf.factorization.dense_optimization import optimize_dense
from bandmf_tf.factorization.inverse_banded import inverse_square_root, optimize_inverse_banded
from bandmf_tf.factorization.optimization import OptimizationResult, ProgressCallback
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.factorization.workloads import Workload
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.planning.bands import BandCandidate, BandSearch, choose_num_bands, search_valley
from bandmf_tf.planning.bins import optimize_buffered_in_bins
from bandmf_tf.planning.comparison import (
    Alternative,
    Comparison,
    Progress,
    alternative,
    compare,
    require_optimum,
)
from bandmf_tf.planning.frontier import Frontier, compute_frontier
from bandmf_tf.planning.plan import (
    AUTO_SAMPLING,
    BANDED_STRATEGIES,
    INVERSE_STRATEGIES,
    SAMPLINGS,
    STRATEGY_NAMES,
    Plan,
    PlanRequest,
    SamplingChoice,
)

# The stages of a plan, in the order in which `progress` is told of them; some may be skipped.
STAGES = ("choosing", "optimising", "calibrating", "comparing")

# Bands that are chosen here, not asked for, keep the optimisation within minutes and a few GB: an
# evaluation costs O(n b^2) time and L-BFGS keeps some twenty arrays of n b entries. For Toeplitz
# strategies under a constant learning rate an evaluation costs O(n b) time.
_LARGEST_BANDED_WORK = 1e11
_LARGEST_BANDED_ENTRIES = 2e7
_LARGEST_TOEPLITZ_WORK = 1e9

# For comparisons and frontiers, which nobody has asked for by number, seconds have to be enough.
_LARGEST_COMPARED_WORK = 1e9

# Comparing numbers of bands needs no more digits than this; the final optimisation gets its own.
_SEARCH_TOLERANCE = 1e-3

# An estimate by samples has no more digits than this.
_ESTIMATE_TOLERANCE = 1e-2

# Balls in bins: more buffers gain little (docs/results.md).
_BUFFERS_IN_BINS = 2

# What twice as many bands of an inverse have to gain.
_SMALLEST_GAIN = 0.01


def make_participation(
    num_rounds: int,
    *,
    min_separation: int | None = None,
    max_participations: int | None = None,
    num_epochs: int | None = None,
    schema: type[FixedEpochs | MinSeparation] | None = None,
) -> Participation | None:
    """Returns the participation that a few numbers describe; None if none of them is given.

    Args:
      num_rounds: Number of rounds n.
      min_separation: b; participations r1 < r2 of a unit have r2 - r1 >= b.
      max_participations: k; what fits into n rounds, ceil(n / b), if left out.
      num_epochs: Passes over the data in a fixed order, instead of the two numbers above: a unit
        comes up once a pass, floor(n / num_epochs) rounds apart at the least.
      schema: `MinSeparation`, or `FixedEpochs` if participations are exactly b rounds apart. None
        stands for the first, but for epochs of equally many rounds, which are the second.
    """
    n = _checks.positive_int("num_rounds", num_rounds)
    if num_epochs is not None:
        if min_separation is not None or max_participations is not None:
            raise BandMFError(
                "num_epochs stands for min_separation and max_participations; leave those out. "
                f"Found num_epochs={num_epochs}, min_separation={min_separation}, "
                f"max_participations={max_participations}."
            )
        max_participations = _checks.positive_int("num_epochs", num_epochs)
        if max_participations > n:
            raise BandMFError(f"num_epochs must be at most num_rounds={n}. Found {num_epochs}.")
        if schema is FixedEpochs and n % max_participations:
            raise BandMFError(
                f"For fixed epochs num_rounds={n} must be a multiple of num_epochs; give "
                f"min_separation, the rounds of an epoch, instead. Found num_epochs={num_epochs}."
            )
        schema = schema or (MinSeparation if n % max_participations else FixedEpochs)
        min_separation = n // max_participations
    if max_participations is not None:
        _checks.positive_int("max_participations", max_participations)
    if min_separation is None:
        if max_participations is None:
            return None
        if max_participations > 1:
            raise BandMFError(
                "Several participations need a min_separation (1 if nothing is known about it). "
                f"Found max_participations={max_participations} without one."
            )
        return SingleParticipation()
    b = _checks.positive_int("min_separation", min_separation)
    if b > n:
        raise BandMFError(
            f"min_separation must be at most num_rounds={n}, which means a single participation. "
            f"Found {b}."
        )
    k = min(ceil_div(n, b), max_participations or n)
    return SingleParticipation() if k == 1 else (schema or MinSeparation)(b, k)


def _silent(stage: str, detail: str) -> None:
    """Shows no progress."""


@dataclasses.dataclass(frozen=True)
class _Size:
    num_bands: int
    reason: str
    search: BandSearch | None


def plan_mechanism(request: PlanRequest, progress: Progress = _silent) -> Plan:
    """Returns the plan for `request`.

    Args:
      request: What to plan for.
      progress: Called with the stage of the work and a detail, often.

    Raises:
      ValueError: No mechanism can be planned for the request; the message says why.
    """
    if request.sampling == AUTO_SAMPLING:
        return _best_sampling(request, progress)
    frontier, budget = None, request.memory_per_parameter
    if budget is not None and not request.is_sampled:
        frontier = compute_frontier(
            request.workload,
            request.unsampled_participation(),
            budget,
            largest_num_bands=_compared_bands(request),
            affordable_num_bands=_unsampled_bands(request),
            include_dense=request.compare_dense,
            progress=progress,
        )
        request = _with_choice(request, frontier)
    return _draft(request, progress).plan(progress, budget, frontier)


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A plan before it is compared with others."""

    request: PlanRequest
    mechanism: Mechanism
    participation: Participation
    choice: _Size
    optimization: OptimizationResult | None

    @property
    def planned(self) -> Alternative:
        return alternative(
            self.request.strategy,
            STRATEGY_NAMES[self.request.strategy],
            self.request.workload,
            self.mechanism.release,
            self.mechanism.noise_multiplier,
            is_amplified=self.mechanism.is_amplified,
        )

    def plan(
        self,
        progress: Progress,
        budget: float | None,
        frontier: Frontier | None = None,
        samplings: tuple[SamplingChoice, ...] = (),
    ) -> Plan:
        strategy = self.mechanism.strategy
        sensitivity = self.participation.sensitivity(strategy)
        return Plan(
            request=self.request,
            mechanism=self.mechanism,
            participation=self.participation,
            sensitivity=sensitivity,
            rmse=error.rmse(self.request.workload, strategy, sensitivity),
            size_reason=self._size_reason(budget, frontier),
            band_search=self.choice.search,
            frontier=frontier,
            memory_per_parameter=budget,
            optimization=self.optimization,
            planned=self.planned,
            comparison=_compare(self.request, self.mechanism, progress),
            samplings=samplings,
        )

    def _size_reason(self, budget: float | None, frontier: Frontier | None) -> str:
        if frontier is not None:
            return frontier.explain()
        if budget is not None and self.request.num_buffers is not None:
            return f"the most that fit into {budget:g} bytes a parameter"
        return self.choice.reason


def _best_sampling(request: PlanRequest, progress: Progress) -> Plan:
    """Returns the plan for the way of drawing batches that has the least error at the target."""
    drafts: dict[str, _Draft] = {}
    choices = []
    for sampling, needs in SAMPLINGS.items():

        def show(stage: str, detail: str, sampling: str = sampling) -> None:
            progress("choosing", f"{sampling}: {stage} {detail}")

        start = time.process_time()
        try:
            draft = _draft(dataclasses.replace(request, sampling=sampling), show)
        except BandMFError as refused:
            choice = SamplingChoice(sampling, needs, str(refused), None, None, None, None, 0.0)
        else:
            drafts[sampling] = draft
            choice = _sampling_choice(draft, needs)
        seconds = time.process_time() - start
        choices.append(dataclasses.replace(choice, cpu_seconds=seconds))
    if not drafts:
        raise BandMFError(f"No sampling can be planned: {choices[0].plan}")
    best = min(drafts.values(), key=_calibrated_rmse)
    choices.sort(key=lambda choice: math.inf if choice.rmse is None else choice.rmse)
    return best.plan(progress, request.memory_per_parameter, samplings=tuple(choices))


def _draft(request: PlanRequest, progress: Progress) -> _Draft:
    """Returns the mechanism; in bins, where BandMF need not be better, that or a BLT.

    A budget is kept by the number of bands or buffers. Where it holds no buffer there is no BLT.
    """
    rows = _BUFFERS_IN_BINS if request.most_rows is None else request.most_rows
    is_open = (request.strategy, request.num_bands) == ("banded", None) and rows > 0
    if request.sampling != BallsInBins.kind or not is_open:
        return _calibrate(request, progress)
    buffered = dataclasses.replace(
        request,
        strategy="blt",
        num_buffers=rows if rows < _BUFFERS_IN_BINS else None,
        memory_per_parameter=None,
    )
    drafts = [_calibrate(one, progress) for one in (buffered, request)]
    return min(drafts, key=_calibrated_rmse)


def _calibrated_rmse(draft: _Draft) -> float:
    return draft.planned.calibrated_rmse


def _sampling_choice(draft: _Draft, needs: str) -> SamplingChoice:
    mechanism, certificate = draft.mechanism, draft.mechanism.guarantee.certificate
    size = f"{mechanism.num_bands} bands"
    if draft.request.strategy == "blt":
        size = f"{draft.request.num_buffers or _BUFFERS_IN_BINS} buffers"
    return SamplingChoice(
        sampling=draft.request.sampling,
        needs=needs,
        plan=f"{draft.planned.name}, {size}",
        rmse=draft.planned.calibrated_rmse,
        noise_multiplier=mechanism.noise_multiplier / mechanism.release.max_column_norm,
        rows_in_memory=mechanism.strategy.rows_in_memory,
        confidence="proven" if certificate is None else certificate.describe(),
        cpu_seconds=0.0,
    )


def _calibrate(request: PlanRequest, progress: Progress) -> _Draft:
    choice = _choose_bands(request, progress)
    strategy, outcome = _make_strategy(request, choice.num_bands, progress)
    if request.strategy == "blt":
        choice = dataclasses.replace(choice, reason=_buffers_reason(request))
    progress("calibrating", "")
    sampling = request.sampling_scheme(strategy.num_bands) if request.is_sampled else None
    participation = request.participation
    if participation is None:
        participation = sampling.participation if sampling else SingleParticipation()
    if request.column_norm is None:
        strategy = strategy.scaled(1.0 / participation.sensitivity(strategy).value)
    else:
        strategy = strategy.scaled(request.column_norm / float(strategy.column_norms().max()))
    release = Release(strategy, sampling.participation if sampling else participation, sampling)
    noise_multiplier, certificate = _calibrated(request, release)
    mechanism = Mechanism.create(
        strategy,
        request.workload,
        release.participation,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=request.l2_norm_clip,
        delta=request.delta,
        sampling=sampling,
        certificate=certificate,
        notes=_notes(request, outcome),
    )
    return _Draft(request, mechanism, participation, choice, outcome)


def _calibrated(request: PlanRequest, release: Release) -> tuple[float, Certificate | None]:
    """Returns the noise that is asked for, with the certificate of the epsilon that it is for."""
    if request.noise_multiplier is not None:
        return request.noise_multiplier, None
    assert request.epsilon is not None
    return release.calibrated(request.epsilon, request.delta)


def _with_choice(request: PlanRequest, frontier: Frontier) -> PlanRequest:
    """Returns the request for what the frontier has chosen."""
    chosen = frontier.chosen
    request = dataclasses.replace(request, memory_per_parameter=None)
    # Equal column norms help only where rounds are not exactly b apart.
    equal = isinstance(request.participation, MinSeparation) or not (
        chosen.strategy == "dense"
        or (chosen.strategy == "banded" and isinstance(request.participation, FixedEpochs))
    )
    return dataclasses.replace(
        request,
        strategy=chosen.strategy,
        num_bands=chosen.size if chosen.strategy in ("banded", "inverse_banded") else None,
        num_buffers=chosen.size if chosen.strategy == "blt" else None,
        equal_column_norms=equal,
    )


def _buffers_reason(request: PlanRequest) -> str:
    if request.num_buffers is not None:
        return "as asked for"
    if request.is_sampled:
        return "more gain little with balls in bins"
    return "one more would lower the error by less than a hundredth"


def _unsampled_bands(request: PlanRequest) -> int:
    """Returns how many bands BandMF has without a budget and without sampling."""
    separation = request.unsampled_participation().separation(request.num_rounds)
    return min(separation, _affordable_bands(request.workload, "banded"))


def _compared_bands(request: PlanRequest) -> int:
    """Returns as many bands as participations are apart, if seconds are enough for them."""
    enough = int(math.sqrt(_LARGEST_COMPARED_WORK / request.num_rounds))
    return max(1, min(_unsampled_bands(request), enough))


def _choose_bands(request: PlanRequest, progress: Progress) -> _Size:
    n = request.num_rounds
    if request.strategy == "identity":
        return _Size(1, "independent noise has one band", None)
    if request.num_bands is not None:
        return _Size(request.num_bands, "as asked for", None)
    if request.strategy in INVERSE_STRATEGIES:
        return _double_bands(request, progress)
    if request.strategy not in BANDED_STRATEGIES:
        return _Size(n, f"{STRATEGY_NAMES[request.strategy]} is not banded", None)
    if request.batch_size is None or request.dataset_size is None:
        return _most_bands(request, request.unsampled_participation().separation(n))
    most = min(n, request.dataset_size // request.batch_size)
    if not request.weighs_bands:
        # Fewer parts gain nothing, but for batches of one example (see `Shuffling`).
        if request.most_rows is not None and request.most_rows + 1 < most:
            reason = f"the most that fit into {request.memory_per_parameter:g} bytes a parameter"
            return _Size(request.most_rows + 1, reason, None)
        return _most_bands(request, most)
    if request.sampling == BallsInBins.kind:
        return _search_in_bins(request, most, progress)
    return _search_bands(request, progress)


def _double_bands(request: PlanRequest, progress: Progress) -> _Size:
    """Returns how many bands of the inverse help."""
    participation = request.unsampled_participation()

    def rmse(num_bands: int) -> float:
        progress("choosing", f"{num_bands} bands")
        strategy, _ = _make_strategy(request, num_bands, _silent)
        return error.rmse(request.workload, strategy, participation.sensitivity(strategy))

    bands, found = 1, rmse(1)
    while 2 * bands <= request.num_rounds:
        more = rmse(2 * bands)
        if more > (1.0 - _SMALLEST_GAIN) * found:
            break
        bands, found = 2 * bands, more
    return _Size(bands, "twice as many would lower the error by less than a hundredth", None)


def _most_bands(request: PlanRequest, separation: int) -> _Size:
    """Returns as many bands as participations are apart, if that is affordable."""
    affordable = _affordable_bands(request.workload, request.strategy)
    if separation <= affordable:
        why = "as many as a unit's participations are apart, for which Theorem 2 is exact"
        if separation == request.num_rounds:
            why = "the full lower triangle, as every unit takes part at most once"
        return _Size(separation, f"{why}; fewer bands need less memory", None)
    return _Size(
        affordable,
        f"the most whose optimisation takes minutes; up to {separation} would have less error "
        "(num_bands asks for them, strategy=toeplitz makes them cheap)",
        None,
    )


def _affordable_bands(workload: Workload, strategy: str) -> int:
    n = workload.num_rounds
    most = _LARGEST_TOEPLITZ_WORK / n
    if strategy == "banded" or not workload.has_constant_learning_rate:
        most = min(math.sqrt(_LARGEST_BANDED_WORK / n), _LARGEST_BANDED_ENTRIES / n)
    return max(1, min(n, int(most)))


def _search_bands(request: PlanRequest, progress: Progress) -> _Size:
    """Weighs amplification against error (Appendix F.4).

    For random schemes, whose noise takes seconds to find, from the best number of bands of cyclic
    Poisson samples on.
    """
    affordable = _affordable_bands(request.workload, request.strategy)

    def loss(num_bands: int) -> float:
        progress("choosing", f"{num_bands} bands")
        if num_bands > affordable:
            # An upper bound in closed form stands in for what would take too long to optimise.
            most = min(num_bands, _affordable_bands(request.workload, "square_root"))
            stand_in = optimization.square_root(request.workload, most)
            return error.squared_error(request.workload, stand_in)
        coarse = dataclasses.replace(request, tolerance=max(request.tolerance, _SEARCH_TOLERANCE))
        strategy, outcome = _make_strategy(coarse, num_bands, _silent)
        if outcome is not None:
            return outcome.loss
        return error.squared_error(request.workload, strategy)

    def show(candidate: BandCandidate) -> None:
        progress("choosing", f"{candidate.num_bands} bands: RMSE {candidate.rmse:.4g}")

    assert request.epsilon is not None
    assert request.batch_size is not None
    assert request.dataset_size is not None
    scheme: Callable[[int, int, int, int], BoundedPoissonSampling | FixedSizeSampling]
    scheme = BoundedPoissonSampling.from_sizes
    if request.sampling == "fixed_size":
        scheme = FixedSizeSampling
    search = choose_num_bands(
        loss,
        epsilon=request.epsilon,
        delta=request.delta,
        num_rounds=request.num_rounds,
        batch_size=request.batch_size,
        dataset_size=request.dataset_size,
        scheme=scheme,
        largest_num_bands=None if request.most_rows is None else request.most_rows + 1,
        progress=show,
    )
    within = [candidate for candidate in search.tried if candidate.num_bands <= affordable]
    best = min(within, key=lambda candidate: candidate.rmse)
    if isinstance(request.sampling_scheme(1), RandomParticipation):
        return _climb(request, best, within, progress)
    reason = f"least error at the target among {len(within)} numbers of bands tried"
    if request.memory_per_parameter is not None:
        reason += f" that fit into {request.memory_per_parameter:g} bytes a parameter"
    if best.num_bands != search.best.num_bands:
        reason += f" that take minutes to optimise ({search.best.num_bands} would be better)"
    return _Size(best.num_bands, reason, BandSearch(best, tuple(within)))


def _climb(
    request: PlanRequest, start: BandCandidate, tried: list[BandCandidate], progress: Progress
) -> _Size:
    """Returns the number of bands, of those tried, beside which the scheme's error is larger.

    Where it is not less than without amplification, as too few replicas of so many bands fit for a
    small delta, fewer bands are tried. In the end the best without amplification may be better.
    """
    assert request.epsilon is not None
    unit = gaussian_noise_multiplier(request.epsilon, request.delta, 1.0)
    schemes = [request.sampling_scheme(candidate.num_bands) for candidate in tried]
    plain = [
        unit * math.sqrt(scheme.participation.most(request.num_rounds) * candidate.squared_error)
        for scheme, candidate in zip(schemes, tried, strict=True)
    ]

    @functools.cache
    def amplified(at: int) -> float:
        progress("choosing", f"{tried[at].num_bands} bands")
        return _likely_error(request, tried[at].num_bands, tried[at].noise_multiplier)

    best = tried.index(start)
    while amplified(best) >= plain[best] and best > 0:
        best -= 1
    first = best
    for step in (1, -1):
        while best + step in range(len(tried)) and amplified(best + step) < amplified(best):
            best += step
        if best != first:
            break
    compared = amplified.cache_info().currsize
    if min(plain) < amplified(best):
        best = plain.index(min(plain))
        return _Size(tried[best].num_bands, "the least error without amplification", None)
    reason = f"about the least error at the target, by {compared} numbers of bands around it"
    return _Size(tried[best].num_bands, reason, None)


def _search_in_bins(request: PlanRequest, most: int, progress: Progress) -> _Size:
    """Returns the number of bands of about the least error in bins."""
    coarse = dataclasses.replace(request, tolerance=max(request.tolerance, _SEARCH_TOLERANCE))
    if request.most_rows is not None:
        most = min(most, request.most_rows + 1)
    compared = 0

    def error_of(num_bands: int) -> float:
        nonlocal compared
        compared += 1
        progress("choosing", f"{num_bands} bands")
        return _likely_error(coarse, num_bands, None)

    best = search_valley(error_of, min(most, _affordable_bands(request.workload, request.strategy)))
    reason = f"about the least error at the target, by {compared} numbers of bands"
    if request.most_rows is not None:
        reason += f" that fit into {request.memory_per_parameter:g} bytes a parameter"
    return _Size(best, reason, None)


def _likely_error(request: PlanRequest, num_bands: int, noise: float | None) -> float:
    """Returns about the error of a random scheme; infinite where no noise is found.

    Args:
      request: What to plan for.
      num_bands: Number of bands.
      noise: For columns of norm 1, where the search begins; None for that without amplification.
    """
    strategy, _ = _make_strategy(request, num_bands, _silent)
    strategy = strategy.scaled(1.0 / float(strategy.column_norms().max()))
    scheme = request.sampling_scheme(num_bands)
    assert isinstance(scheme, RandomParticipation)
    assert request.epsilon is not None
    target = request.epsilon, request.delta
    plain = gaussian_noise_multiplier(*target, scheme.participation.sensitivity(strategy).value)
    start = noise or plain
    try:
        found = scheme.likely_noise_multiplier(
            strategy, *target, start=start, tolerance=_SEARCH_TOLERANCE, most=2.0 * plain
        )
    except NotCertifiedError:
        try:
            found = scheme.estimated_noise_multiplier(
                strategy, *target, start=plain, tolerance=_ESTIMATE_TOLERANCE
            )
        except NotCertifiedError:
            return math.inf
    return found * math.sqrt(error.squared_error(request.workload, strategy))


def _make_strategy(
    request: PlanRequest, num_bands: int, progress: Progress
) -> tuple[Strategy, OptimizationResult | None]:
    """Returns the strategy before scaling, and where its optimiser stopped."""
    workload, n = request.workload, request.num_rounds
    if request.strategy == "identity":
        return strategies.identity(n), None
    if request.strategy in ("tree_full", "tree_online"):
        return trees.TreeStrategy(n, request.strategy.removeprefix("tree_")), None
    if request.strategy == "square_root":
        return optimization.square_root(workload, num_bands), None
    if request.strategy == "inverse_square_root":
        return inverse_square_root(workload, num_bands), None
    separation = request.unsampled_participation().separation(n)
    progress("optimising", STRATEGY_NAMES[request.strategy])
    show = _iterations(n, progress)
    if request.strategy == "blt":
        buffers = request.num_buffers
        if request.is_sampled:
            buffers = buffers or _BUFFERS_IN_BINS
            scheme = request.sampling_scheme(1)
            assert isinstance(scheme, BallsInBins)
            if request.epsilon is not None:
                target = (request.epsilon, request.delta)
                return optimize_buffered_in_bins(workload, buffers, scheme, *target), None
        participation = request.unsampled_participation()
        outcome = optimize_buffered(workload, buffers, participation, progress=show)
    elif request.strategy == "inverse_banded":
        participation = request.unsampled_participation()
        outcome = optimize_inverse_banded(workload, num_bands, participation, progress=show)
    elif request.strategy == "toeplitz":
        outcome = optimization.optimize_toeplitz(workload, num_bands, progress=show)
    elif request.strategy == "dense":
        outcome = optimize_dense(
            workload,
            separation,
            equal_column_norms=request.equal_column_norms,
            tolerance=request.tolerance,
            progress=show,
        )
        require_optimum(outcome)
    elif request.equal_column_norms:
        outcome = optimization.optimize_banded(
            workload, num_bands, tolerance=request.tolerance, progress=show
        )
    else:
        outcome = optimization.optimize_banded_fixed_epochs(
            workload, num_bands, separation, tolerance=request.tolerance, progress=show
        )
    return outcome.strategy, outcome


def _iterations(num_rounds: int, progress: Progress) -> ProgressCallback:
    def show(iteration: int, loss: float) -> None:
        error = math.sqrt(loss / num_rounds)
        progress("optimising", f"iteration {iteration}, RMSE {error:.6g} before scaling")

    return show


def _notes(
    request: PlanRequest, outcome: OptimizationResult | None
) -> dict[str, str | int | float | bool]:
    notes: dict[str, str | int | float | bool] = {
        "planned by": "bandmf_tf.planning.planner",
        "strategy": request.strategy,
        "calibrated to": "epsilon" if request.epsilon is not None else "noise_multiplier",
    }
    if outcome is not None:
        notes["optimization converged"] = bool(outcome.converged)
        notes["optimization iterations"] = int(outcome.iterations)
        notes["optimization guarantee"] = outcome.guarantee
        if math.isfinite(outcome.relative_change):
            notes["optimization relative change"] = float(outcome.relative_change)
    return notes


def _sampling_of_dp_sgd(request: PlanRequest) -> SamplingScheme | None:
    """Returns how DP-SGD draws batches: from the whole data set, not by secret parts or bins."""
    if request.batch_size is None or request.dataset_size is None:
        return None
    whole = request.sampling_scheme(1)
    if not isinstance(whole, RandomParticipation):
        return whole
    return BoundedPoissonSampling.from_sizes(
        request.num_rounds, 1, request.batch_size, request.dataset_size
    )


def _compare(request: PlanRequest, mechanism: Mechanism, progress: Progress) -> Comparison:
    epsilon = request.epsilon or mechanism.epsilon
    participation = request.unsampled_participation()
    if epsilon <= 0.0:
        reason = "All: epsilon is 0 in double precision, so there is no target."
        return Comparison(participation, (), (reason,))
    banded = None
    if request.is_sampled and request.strategy in BANDED_STRATEGIES:
        banded = _unsampled_bands(request)
    elif request.strategy in ("blt", *INVERSE_STRATEGIES):
        banded = _compared_bands(request)
    return compare(
        request.workload,
        participation,
        epsilon=epsilon,
        delta=request.delta,
        planned=request.strategy,
        sampling=_sampling_of_dp_sgd(request),
        banded_num_bands=banded,
        include_dense=request.compare_dense,
        progress=progress,
    )
