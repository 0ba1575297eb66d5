"""Hyperparameters chosen by training several times and releasing the best run alone.

Training K times and choosing costs more than one run, but not K times as much, if K is drawn at
random beforehand and nobody can tell how many runs there were (Papernot and Steinke 2022). Where
each run is (lambda, eps(lambda))-RDP, the best of K is (lambda, eps'(lambda))-RDP with

    eps'(lambda) = eps(lambda) + (1 + eta) ((1 - 1/l) eps(l) + log(1 / gamma) / l)
                   + log(E[K]) / (lambda - 1)         for every l > 1    (their Theorem 2)

for K of a truncated negative binomial distribution of shape eta and parameter gamma: geometric is
eta = 1, logarithmic eta = 0; and by their Theorem 6 for a Poisson K. rho-zCDP is eps(lambda) =
rho lambda. `dp_accounting` evaluates both, and converts to epsilon.

It assumes that K was drawn from the stated distribution and used as drawn, that every run had at
most this rho, and that what a run is judged by is covered by it: computed from its released model
and public data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bandmf_tf import _checks
from bandmf_tf.errors import BandMFError

if TYPE_CHECKING:
    import dp_accounting

# Distributions of the number of runs, by the shape that dp_accounting knows them by.
DISTRIBUTIONS = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}

# dp_accounting's own, and more between 64 and 1,024 for small rho.
_ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(round(64 * 2 ** (x / 4)) for x in range(29)),
)


@dataclasses.dataclass(frozen=True)
class PrivateSelection:
    """The best of a random number of runs.

    Attributes:
      mean: Runs in the mean.
      distribution: One of `DISTRIBUTIONS`.
    """

    mean: float
    distribution: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _checks.positive_float("mean", self.mean))
        if self.mean < 1:
            raise BandMFError(f"mean, the mean number of runs, must be 1 or more, not {self.mean}.")
        if self.distribution not in tuple(DISTRIBUTIONS):
            raise BandMFError(
                f"distribution must be one of {', '.join(DISTRIBUTIONS)}. Found "
                f"{self.distribution!r}."
            )
        if self.mean == 1 and self.distribution != "poisson":
            raise BandMFError(
                f"A {self.distribution} number of runs with mean=1 is always one; leave it out."
            )

    def describe(self) -> str:
        """Returns the choice in words."""
        return f"the best of a {self.distribution} number of runs, {self.mean:g} in the mean"


def selected_epsilon(
    selected: Sequence[tuple[float, PrivateSelection]], rho: float, delta: float
) -> float:
    """Returns epsilon of releases that were selected and of others together.

    Args:
      selected: For each that was selected, rho of one run, and how it was.
      rho: zCDP of all others together; 0 if there are none.
      delta: Delta of the guarantee.
    """
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant(orders=_ORDERS)
    for each, selection in selected:
        accountant.compose(
            dp_accounting.dp_event.RepeatAndSelectDpEvent(
                _gaussian(each), selection.mean, DISTRIBUTIONS[selection.distribution]
            )
        )
    if rho > 0:
        accountant.compose(_gaussian(rho))
    return float(accountant.get_epsilon(_checks.probability("delta", delta)))


def _gaussian(rho: float) -> dp_accounting.DpEvent:
    """Returns the Gaussian release of this rho, whose RDP is that of rho-zCDP at every order."""
    import dp_accounting

    return dp_accounting.GaussianDpEvent(1 / math.sqrt(2 * _checks.positive_float("rho", rho)))
