"""SciPy's L-BFGS with progress and a stopping rule of the caller; undefined values are left again.

`scipy.optimize.minimize` stops on single iterations and gradients, which say little about how far a
slowly converging loss is from its minimum; with `stalled`, several iterations together have to gain
something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import scipy.optimize

from bandmf_tf import _checks

# x -> (value, gradient).
Function = Callable[[np.ndarray], tuple[float, np.ndarray]]

_STALL_ITERATIONS = 8
_VANISHING_GRADIENT = 1e-12
# Where no decrease is found any more, a gradient below this tells a minimum from a broken search.
_SMALL_GRADIENT = 1e-4
_ENORMOUS = 1e100


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where the minimisation stopped.

    Attributes:
      x: The point.
      value: The function there.
      gradient_norm: Euclidean norm of the gradient there.
      converged: Whether the stopping rule was met before the iteration limit.
      iterations: Iterations done.
      recent_gain: Decrease of the value over the last iterations looked at.
    """

    x: np.ndarray
    value: float
    gradient_norm: float
    converged: bool
    iterations: int
    recent_gain: float


class _Finished(Exception):
    """Ends the minimisation from within its callback; SciPy 1.9 offers no other way."""


def stalled(tolerance: float) -> Callable[[Sequence[float]], bool]:
    """Returns the rule: the last 8 iterations together gained less than `tolerance`."""
    tolerance = _checks.positive_float("tolerance", tolerance)
    return lambda history: len(history) > _STALL_ITERATIONS and _recent_gain(history) < tolerance


def minimize(
    function: Function,
    start: np.ndarray,
    *,
    finished: Callable[[Sequence[float]], bool],
    max_iterations: int,
    progress: Callable[[int, float], None] | None = None,
    corrections: int = 10,
) -> Outcome:
    """Minimises until the values of all iterations so far satisfy `finished`.

    Args:
      function: Returns the value and the gradient; a value that is not finite, or enormous, is
        stepped back from.
      start: Where to start, a vector.
      finished: The stopping rule, for example `stalled(1e-4)`.
      max_iterations: Limit on iterations.
      progress: Called with the iteration and the value after every iteration.
      corrections: How many iterations the approximation of the Hessian remembers.
    """
    max_iterations = _checks.positive_int("max_iterations", max_iterations)
    value, gradient = function(start)
    accepted = _Point(start, value, float(np.linalg.norm(gradient)))
    history = [value]
    if finished(history) or accepted.gradient_norm < _VANISHING_GRADIENT:
        return _outcome(accepted, history, converged=True)
    latest = accepted

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal latest
        value, gradient = function(x)
        if not abs(value) < _ENORMOUS:
            # Somewhat worse than the last point, and flat: the line search comes back from there.
            return accepted.value + 1.0, np.zeros_like(x)
        latest = _Point(x.copy(), value, float(np.linalg.norm(gradient)))
        return value, gradient

    def after_iteration(x: np.ndarray) -> None:
        nonlocal accepted
        # SciPy tells an accepted point, the last one evaluated, by x and without its value. After a
        # failed line search it tells a point without any decrease, which is not an iteration.
        if latest.value >= accepted.value or not np.array_equal(x, latest.x):
            return
        accepted = latest
        history.append(accepted.value)
        if progress is not None:
            progress(len(history) - 1, accepted.value)
        if finished(history):
            raise _Finished

    options = {
        "maxiter": max_iterations,
        "maxfun": 30 * max_iterations,
        "maxcor": corrections,
        "ftol": 0.0,
        "gtol": 0.0,
    }
    try:
        stopped = scipy.optimize.minimize(
            evaluate, start, jac=True, method="L-BFGS-B", callback=after_iteration, options=options
        )
    except _Finished:
        return _outcome(accepted, history, converged=True)
    # Status 1 is the iteration limit. The others say that no further decrease was found, which a
    # broken line search says as well: the gradient tells them apart.
    found = stopped.status != 1 and accepted.gradient_norm < _SMALL_GRADIENT
    return _outcome(accepted, history, converged=found)


@dataclasses.dataclass(frozen=True)
class _Point:
    x: np.ndarray
    value: float
    gradient_norm: float


def _outcome(point: _Point, history: list[float], converged: bool) -> Outcome:
    return Outcome(
        x=point.x,
        value=point.value,
        gradient_norm=point.gradient_norm,
        converged=converged,
        iterations=len(history) - 1,
        recent_gain=_recent_gain(history),
    )


def _recent_gain(history: Sequence[float]) -> float:
    return history[max(0, len(history) - 1 - _STALL_ITERATIONS)] - history[-1]
