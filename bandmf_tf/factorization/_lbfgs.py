"""L-BFGS with progress and a stopping rule of the caller; undefined values are stepped back from.

`scipy.optimize.minimize` stops on single iterations and gradients, which say little about how far a
slowly converging loss is from its minimum; with `stalled`, several iterations together have to gain
something. SciPy's also handles bounds, as Python lists: for the millions of variables of a banded
strategy that took more time and memory than the loss. This is the textbook's (Nocedal & Wright,
Algorithm 7.4) with a line search by bisection for the weak Wolfe conditions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div

# x -> (value, gradient).
Function = Callable[[np.ndarray], tuple[float, np.ndarray]]

_STALL_ITERATIONS = 4
_VANISHING_GRADIENT = 1e-12
# Where no decrease is found any more, a gradient below this tells a minimum from a broken search.
_SMALL_GRADIENT = 1e-4
_ENORMOUS = 1e100
# Beyond so many variables half the memory is enough for the approximation of the Hessian.
_MANY_VARIABLES = 1_000_000

# The line search: sufficient decrease, sufficient change of the slope, most evaluations.
_DECREASE, _CURVATURE, _MOST_STEPS = 1e-4, 0.9, 40


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
      first_scale: What the first step told of the function's curvature, as a length of steps along
        the gradient; None if there was no step.
    """

    x: np.ndarray
    value: float
    gradient_norm: float
    converged: bool
    iterations: int
    recent_gain: float
    first_scale: float | None


def stalled(tolerance: float) -> Callable[[Sequence[float]], bool]:
    """Returns the rule: the last 4 iterations together gained less than `tolerance`."""
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
    first_step: float | None = None,
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
      first_step: How far to go along the first gradient, the `first_scale` of a problem like this
        one; None goes no further than a length of 1.
    """
    max_iterations = _checks.positive_int("max_iterations", max_iterations)
    point = _Point(np.array(start, dtype=np.float64), *function(start))
    history = [point.value]
    corrections = corrections if start.size < _MANY_VARIABLES else ceil_div(corrections, 2)
    pairs: collections.deque[_Pair] = collections.deque(maxlen=corrections)
    scale: float | None = None
    while len(history) <= max_iterations:
        if finished(history) or point.gradient_norm < _VANISHING_GRADIENT:
            return _outcome(point, history, scale, converged=True)
        size = 1.0 if pairs else first_step or min(1.0, 1.0 / point.gradient_norm)
        following = _search(function, point, _direction(point.gradient, pairs), size)
        if following is None and pairs:  # The approximation may be at fault: forget it.
            pairs.clear()
            size = min(1.0, 1.0 / point.gradient_norm)
            following = _search(function, point, -point.gradient, size)
        if following is None:
            # No further decrease: at a minimum, or at a kink, which the gradient tells apart.
            converged = point.gradient_norm < _SMALL_GRADIENT
            return _outcome(point, history, scale, converged=converged)
        step, change = following.x - point.x, following.gradient - point.gradient
        product = float(step @ change)
        if product > 0.0:
            pairs.append(_Pair(step, change, product))
            scale = scale or pairs[-1].scale
        point = following
        history.append(point.value)
        if progress is not None:
            progress(len(history) - 1, point.value)
    return _outcome(point, history, scale, converged=finished(history))


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A step, by how much it changed the gradient, and their product."""

    step: np.ndarray
    change: np.ndarray
    product: float

    @property
    def scale(self) -> float:
        return self.product / float(self.change @ self.change)


def _direction(gradient: np.ndarray, pairs: Sequence[_Pair]) -> np.ndarray:
    """Returns minus the approximate inverse Hessian times the gradient, by two loops."""
    direction = -gradient
    weights = []
    for pair in reversed(pairs):
        weights.append(float(pair.step @ direction) / pair.product)
        direction = scipy.linalg.blas.daxpy(pair.change, direction, a=-weights[-1])  # In place.
    if pairs:
        direction *= pairs[-1].scale
    for pair, weight in zip(pairs, reversed(weights), strict=True):
        weight -= float(pair.change @ direction) / pair.product
        direction = scipy.linalg.blas.daxpy(pair.step, direction, a=weight)
    return direction


def _search(function: Function, point: _Point, direction: np.ndarray, size: float) -> _Point | None:
    """Returns a point with less value and a flatter slope, or None if there is none to be found.

    From a step of `size` on, an interval is halved (or doubled as long as it is open) until a point
    in it satisfies the weak Wolfe conditions; if none does, the best one that has less value is
    returned.
    """
    slope = float(point.gradient @ direction)
    if not slope < 0.0:
        return None
    low, high = 0.0, math.inf
    best: _Point | None = None
    for _ in range(_MOST_STEPS):
        x = scipy.linalg.blas.daxpy(direction, point.x.copy(), a=size)
        value, gradient = function(x)
        if not abs(value) < _ENORMOUS or value > point.value + _DECREASE * size * slope:
            high = size
        else:
            if value < (point.value if best is None else best.value):
                best = _Point(x, value, gradient)
            if float(gradient @ direction) >= _CURVATURE * slope:
                return best
            low = size
        size = 2.0 * low if math.isinf(high) else (low + high) / 2.0
    return best


@dataclasses.dataclass(frozen=True)
class _Point:
    x: np.ndarray
    value: float
    gradient: np.ndarray

    @property
    def gradient_norm(self) -> float:
        return float(np.linalg.norm(self.gradient))


def _outcome(
    point: _Point, history: list[float], first_scale: float | None, *, converged: bool
) -> Outcome:
    return Outcome(
        x=point.x,
        value=point.value,
        gradient_norm=point.gradient_norm,
        converged=converged,
        iterations=len(history) - 1,
        recent_gain=_recent_gain(history),
        first_scale=first_scale,
    )


def _recent_gain(history: Sequence[float]) -> float:
    return history[max(0, len(history) - 1 - _STALL_ITERATIONS)] - history[-1]
