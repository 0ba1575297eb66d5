"""L-BFGS for smooth functions of many variables, with progress and a stopping rule on the value.

SciPy's L-BFGS-B keeps Python lists of bounds, which for millions of variables cost more than the
iterations, and cannot be stopped from its callback. This is the unconstrained method as in Nocedal
and Wright, *Numerical Optimization*, Algorithm 7.5, with a bisection for the Wolfe conditions.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from bandmf_tf import _checks

# x -> (value, gradient).
Function = Callable[[np.ndarray], tuple[float, np.ndarray]]

_MEMORY = 10
_STALL_ITERATIONS = 8
_SUFFICIENT_DECREASE = 1e-4
_CURVATURE = 0.9
_LINE_SEARCH_EVALUATIONS = 30
_VANISHING_GRADIENT = 1e-12
# Where no decrease is found any more, a gradient below this tells a minimum from a broken search.
_SMALL_GRADIENT = 1e-4


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


@dataclasses.dataclass(frozen=True)
class _Point:
    x: np.ndarray
    value: float
    gradient: np.ndarray


def minimize(
    function: Function,
    start: np.ndarray,
    *,
    tolerance: float,
    max_iterations: int,
    progress: Callable[[int, float], None] | None = None,
) -> Outcome:
    """Minimises until the last 8 iterations together lower the value by less than `tolerance`.

    Args:
      function: Returns the value and the gradient; a value that is not finite, or enormous, is
        stepped back from.
      start: Where to start, a vector.
      tolerance: See above; an absolute difference of values.
      max_iterations: Limit on iterations.
      progress: Called with the iteration and the value after every iteration.
    """
    tolerance = _checks.positive_float("tolerance", tolerance)
    max_iterations = _checks.positive_int("max_iterations", max_iterations)
    point = _Point(start, *function(start))
    history = [point.value]
    pairs: collections.deque[_Pair] = collections.deque(maxlen=_MEMORY)
    converged = bool(np.linalg.norm(point.gradient) < _VANISHING_GRADIENT)
    while not converged and len(history) <= max_iterations:
        following = _wolfe_step(function, point, -_inverse_hessian_product(pairs, point.gradient))
        if following is None:
            if not pairs:
                converged = bool(np.linalg.norm(point.gradient) < _SMALL_GRADIENT)
                break
            pairs.clear()  # Try once more along the gradient.
            continue
        _remember(pairs, point, following)
        point = following
        history.append(point.value)
        if progress is not None:
            progress(len(history) - 1, point.value)
        stalled = len(history) > _STALL_ITERATIONS and _recent_gain(history) < tolerance
        converged = stalled or bool(np.linalg.norm(point.gradient) < _VANISHING_GRADIENT)
    return Outcome(
        x=point.x,
        value=point.value,
        gradient_norm=float(np.linalg.norm(point.gradient)),
        converged=converged,
        iterations=len(history) - 1,
        recent_gain=_recent_gain(history),
    )


# A change of x, the change of the gradient, and the inverse of their product.
_Pair = tuple[np.ndarray, np.ndarray, float]


def _remember(pairs: collections.deque[_Pair], point: _Point, following: _Point) -> None:
    """Appends the last step, if the function curves upwards along it."""
    s, y = following.x - point.x, following.gradient - point.gradient
    curvature = float(s @ y)
    if curvature > 1e-12 * (y @ y):
        pairs.append((s, y, 1.0 / curvature))


def _inverse_hessian_product(pairs: collections.deque[_Pair], gradient: np.ndarray) -> np.ndarray:
    """The two-loop recursion; without pairs, a step of length 1 along the gradient."""
    result = gradient.copy()
    if not pairs:
        return result / np.linalg.norm(gradient)
    weights = []
    for s, y, inverse in reversed(pairs):
        weights.append(inverse * (s @ result))
        result -= weights[-1] * y
    _, y, inverse = pairs[-1]
    result /= inverse * (y @ y)
    for (s, y, inverse), weight in zip(pairs, reversed(weights), strict=True):
        result += (weight - inverse * (y @ result)) * s
    return result


def _wolfe_step(function: Function, point: _Point, direction: np.ndarray) -> _Point | None:
    """Returns a point along `direction` with a sufficient decrease, or None if none is found.

    The point also satisfies the curvature condition, unless the evaluations run out before.
    """
    slope = float(point.gradient @ direction)
    lowest, highest, step = 0.0, np.inf, 1.0
    best = None
    for _ in range(_LINE_SEARCH_EVALUATIONS if slope < 0.0 else 0):
        x = point.x + step * direction
        candidate = _Point(x, *function(x))
        enough = point.value + _SUFFICIENT_DECREASE * step * slope
        if candidate.value <= enough and candidate.value < point.value:
            best = candidate
            if candidate.gradient @ direction >= _CURVATURE * slope:
                break
            lowest = step
        else:
            highest = step
        if highest == np.inf:
            step *= 2.0
        elif lowest > 0.0:
            step = (lowest + highest) / 2.0
        else:
            # The minimum of the parabola through both values and the slope; NaN counts as far off.
            excess = candidate.value - point.value - slope * step
            step = float(np.fmin(np.fmax(-slope * step**2 / (2.0 * excess), step / 10), step / 2))
    return best


def _recent_gain(history: list[float]) -> float:
    return history[max(0, len(history) - 1 - _STALL_ITERATIONS)] - history[-1]
