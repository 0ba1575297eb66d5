"""Privacy of one Gaussian release: noise <-> mu-GDP <-> rho-zCDP <-> (epsilon, delta).

Without amplification a matrix mechanism is one Gaussian release of C x + z (Denisov et al. 2022,
also when x is chosen adaptively). With

    noise_multiplier = standard deviation of z / clip norm of one contribution to x,
    sensitivity      = largest ||C u|| over the contributions u of one example, clip norm 1,

the release is mu-GDP for mu = sensitivity / noise_multiplier and rho-zCDP for rho = mu^2 / 2.
`sensitivity` belongs to the strategy *as stored* and to its participation schema; it is 1 for a
strategy that was scaled to sensitivity 1, and every function here takes it beside the noise
multiplier.

Epsilon is that of the closed form (Balle and Wang 2018), rounded up. With a `discretization` it
comes from a privacy loss distribution on a grid of that width instead, as in the paper's tables: an
upper bound that a finer grid can only lower. The conversion from zCDP alone (`zcdp_epsilon`) is
looser and holds for any rho-zCDP mechanism.

Adjacency: sensitivities are stated for zero-out neighbours, where the contributions of one example
are replaced by zeros and nobody's participation changes. For replace-one neighbours they double.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy

from bandmf_tf import _checks
from bandmf_tf._numbers import exactly, round_down, round_up
from bandmf_tf.accounting.certificates import Certificate
from bandmf_tf.accounting.privacy_loss import (
    PoissonSampledGaussian,
    gaussian_closed_epsilon,
    gaussian_profile,
    sampled_epsilon,
)
from bandmf_tf.errors import BandMFError

# A calibrated noise multiplier reaches its target epsilon up to this relative gap, from below.
_CALIBRATION_GAP = 1e-6


class Adjacency(enum.StrEnum):
    """Which pairs of data sets a guarantee makes indistinguishable."""

    ZERO_OUT = "zero-out"
    """The contributions of one example are replaced by zeros wherever it participates."""

    REPLACE_ONE = "replace-one"
    """The contributions of one example are replaced by other clipped ones."""


@dataclass(frozen=True)
class PrivacyGuarantee:
    """An (epsilon, delta)-DP and rho-zCDP guarantee with everything it rests on.

    Attributes:
        epsilon: Upper bound on epsilon at `delta`.
        delta: Delta of the guarantee.
        rho: The mechanism is rho-zCDP as well. Sampling and shuffling do not lower this figure.
        adjacency: The neighbouring relation of both statements.
        accounting: How epsilon was computed.
        assumptions: What has to be true of the training run for the guarantee to hold.
        certificate: What epsilon rests on if that is samples, with their confidence; else None.
    """

    epsilon: float
    delta: float
    rho: float
    adjacency: Adjacency
    accounting: str
    assumptions: tuple[str, ...]
    certificate: Certificate | None = None

    @property
    def failure_probability(self) -> float | None:
        """How likely the samples of the certificate were misleading; None without samples."""
        if self.certificate is None or not self.certificate.samples:
            return None
        return self.certificate.failure_probability

    def __str__(self) -> str:
        confidence = "" if self.certificate is None else self.certificate.confidence
        return (
            f"({round_up(self.epsilon, 6):g}, {exactly(self.delta)})-DP{confidence} and "
            f"{round_up(self.rho, 6):g}-zCDP for {self.adjacency} neighbours"
        )


class CalibrationError(BandMFError):
    """No noise multiplier reaches the target."""


def gdp_mu(noise_multiplier: float, sensitivity: float) -> float:
    """Returns mu for which the release is mu-GDP: its signal-to-noise ratio."""
    noise_multiplier = _checks.positive_float("noise_multiplier", noise_multiplier)
    return _checks.positive_float("sensitivity", sensitivity) / noise_multiplier


def zcdp_rho(noise_multiplier: float, sensitivity: float) -> float:
    """Returns rho for which the release is rho-zCDP."""
    mu = gdp_mu(noise_multiplier, sensitivity)
    return mu * mu / 2


def gaussian_delta(noise_multiplier: float, sensitivity: float, epsilon: float) -> float:
    """Returns the smallest delta for which the release is (epsilon, delta)-DP, in closed form."""
    return float(gaussian_profile(gdp_mu(noise_multiplier, sensitivity), epsilon))


def gaussian_epsilon(
    noise_multiplier: float,
    sensitivity: float,
    delta: float,
    *,
    discretization: float | None = None,
) -> float:
    """Returns epsilon of the release at `delta`: closed form, or PLD on a grid of a given width."""
    mu = gdp_mu(noise_multiplier, sensitivity)
    delta = _checks.probability("delta", delta)
    if discretization is None:
        return gaussian_closed_epsilon(mu, delta)
    discretization = _checks.positive_float("discretization", discretization)
    return sampled_epsilon(PoissonSampledGaussian(mu, 1.0), 1, delta, discretization)


def gaussian_noise_multiplier(
    epsilon: float,
    delta: float,
    sensitivity: float,
    *,
    discretization: float | None = None,
) -> float:
    """Returns the smallest noise multiplier with `gaussian_epsilon` at most `epsilon`.

    Smallest up to a relative gap of 1e-6 in epsilon, and on the safe side of it.
    """
    sensitivity = _checks.positive_float("sensitivity", sensitivity)
    return calibrate_noise_multiplier(
        lambda noise: gaussian_epsilon(noise, sensitivity, delta, discretization=discretization),
        epsilon,
        # The closed form is as good as the grid is fine.
        start=sensitivity / largest_gdp_mu(epsilon, delta),
    )


def gaussian_guarantee(
    noise_multiplier: float,
    sensitivity: float,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    assumptions: tuple[str, ...] = (),
    discretization: float | None = None,
) -> PrivacyGuarantee:
    """Returns the guarantee of the release.

    Args:
        noise_multiplier: Noise standard deviation over clip norm.
        sensitivity: Of the strategy as stored, for zero-out neighbours. It is doubled here if
            `adjacency` is replace-one.
        delta: Delta of the guarantee.
        adjacency: The neighbouring relation to state the guarantee for.
        assumptions: What the sensitivity rests on, for example the participation schema.
        discretization: Width of the grid of privacy losses; None for the closed form.

    Returns:
        The guarantee, with `assumptions` in front of those of a Gaussian release.
    """
    if Adjacency(adjacency) is Adjacency.REPLACE_ONE:
        sensitivity = 2 * _checks.positive_float("sensitivity", sensitivity)
    return PrivacyGuarantee(
        epsilon=gaussian_epsilon(
            noise_multiplier, sensitivity, delta, discretization=discretization
        ),
        delta=delta,
        rho=zcdp_rho(noise_multiplier, sensitivity),
        adjacency=Adjacency(adjacency),
        accounting=(
            f"one Gaussian release of sensitivity {round_up(sensitivity, 6):g} with noise "
            f"multiplier {round_down(noise_multiplier, 6):g}, "
            f"{describe_gaussian_accounting(discretization)}"
        ),
        assumptions=(
            *assumptions,
            "every contribution is clipped to the clip norm before it is summed",
        ),
    )


def describe_gaussian_accounting(discretization: float | None) -> str:
    """Returns in words how `gaussian_epsilon` computes."""
    if discretization is None:
        return "closed form, rounded up"
    return f"PLD on a grid of {discretization:g}, rounded up"


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns an epsilon at `delta` that holds for every rho-zCDP mechanism.

    The bound of Canonne, Kamath, Steinke 2020 (Proposition 12), valid for each Rényi order
    alpha > 1 and minimised over it:

        epsilon = alpha rho + log(1 - 1 / alpha) - log(alpha delta) / (alpha - 1).

    Never below `gaussian_epsilon` for the Gaussian release with the same rho.
    """
    rho = _checks.positive_float("rho", rho)
    delta = _checks.probability("delta", delta)

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)  # alpha - 1
        alpha = 1 + excess
        return alpha * rho + math.log(excess / alpha) - math.log(alpha * delta) / excess

    # The order that is optimal for the simpler bound alpha rho - log(delta) / (alpha - 1), with
    # room on both sides; any order gives a valid bound.
    centre = 0.5 * math.log(-math.log(delta) / rho)
    best = scipy.optimize.minimize_scalar(bound, bounds=(centre - 5, centre + 5), method="bounded")
    return max(0.0, float(best.fun))


def largest_gdp_mu(epsilon: float, delta: float) -> float:
    """Returns the largest mu for which mu-GDP implies (epsilon, delta)-DP, in closed form."""
    epsilon = _checks.positive_float("epsilon", epsilon)
    delta = _checks.probability("delta", delta)

    def excess(log_mu: float) -> float:
        return float(gaussian_profile(math.exp(log_mu), epsilon)) - delta

    lowest, highest = -50.0, math.log(math.sqrt(2 * epsilon) + 50.0)
    return math.exp(scipy.optimize.brentq(excess, lowest, highest, xtol=1e-12))


def calibrate_noise_multiplier(
    epsilon_at: Callable[[float], float],
    epsilon: float,
    start: float,
    *,
    slope: float = -1.0,
    gap: float = _CALIBRATION_GAP,
) -> float:
    """Returns a noise multiplier at which `epsilon_at` is at most `epsilon`, and only just.

    A secant search on logarithmic scales, kept inside the bracket of what is known to be too
    little and enough noise. The value returned has itself been evaluated.

    Args:
        epsilon_at: Epsilon as a non-increasing function of the noise multiplier.
        epsilon: The target.
        start: Where to begin; the closer, the fewer evaluations.
        slope: A guess of d log(epsilon) / d log(noise multiplier) there.
        gap: The result has epsilon in [(1 - gap) * target, target], unless `epsilon_at` jumps
            over that interval; then it is the enough-noise side of the jump.

    Raises:
        CalibrationError: No finite noise multiplier is enough.
    """
    epsilon = _checks.positive_float("epsilon", epsilon)
    goal = math.log(epsilon) + math.log1p(-gap / 2)
    x = math.log(_checks.positive_float("start", start))
    too_little, enough = -math.inf, math.inf
    last_x, last_excess = math.nan, math.nan
    for iteration in range(200):
        reached = epsilon_at(math.exp(x))
        if reached <= epsilon:
            enough = x
            if reached >= (1 - gap) * epsilon or enough - too_little < 1e-9:
                return math.exp(x)
        else:
            too_little = x
        excess = min(max(math.log(max(reached, 1e-300)) - goal, -3.0), 3.0)
        secant = (excess - last_excess) / (x - last_x)
        if secant < 0.0:  # neither the first step nor two points far off
            slope = secant
        last_x, last_excess = x, excess
        x += min(max(-excess / slope, -math.log(4.0)), math.log(4.0))
        if iteration > 30 or not too_little < x < enough:
            x = (too_little + enough) / 2
        if not abs(x) < 100:
            break
    raise CalibrationError(
        f"no noise multiplier reaches epsilon={exactly(epsilon)}, the last one tried gave "
        f"{exactly(reached)}; choose a larger epsilon or a larger delta."
    )
