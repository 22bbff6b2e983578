"""End of a learning curve, and whether a trial can still become the best.

T. Domhan, J. Springenberg, F. Hutter, "Speeding up automatic hyperparameter optimization of deep neural networks by
extrapolation of learning curves", IJCAI 2015, with one family of curves: a + b t^-c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_EXPONENTS = np.linspace(0.1, 3.0, 30)
LEAST_POINTS = 4


@dataclass(frozen=True)
class Forecast:
    """Forecast of a learning curve's end.

    Attributes:
        value: expected value at the end.
        deviation: deviation of that.
    """

    value: float
    deviation: float


def extrapolated(curve: Sequence[tuple[float, float]], end: float) -> Forecast | None:
    """Return where a learning curve ends, by power laws a + b t^-c.

    For each c of a grid, a and b are found by least squares; the curves are averaged with the weights
    exp(-n/2 log(residual)), the likelihood of normal noise of unknown size. The deviation is that of the curves among
    each other, with their residuals and the uncertainty of each fit.

    Args:
        curve: (epochs, value) of tests, in order.
        end: epochs at which it ends.

    Returns:
        The forecast; None with fewer than four points.
    """
    if len(curve) < LEAST_POINTS:
        return None
    t = np.array([each for each, _ in curve], dtype=float)
    y = np.array([each for _, each in curve], dtype=float)
    if not (np.isfinite(y).all() and (t > 0).all()):
        return None
    means, variances, logs = [], [], []
    for exponent in _EXPONENTS:
        design = np.stack([np.ones_like(t), t**-exponent], axis=1)
        solution, *_ = np.linalg.lstsq(design, y, rcond=None)
        residual = y - design @ solution
        spread = max(float(residual @ residual) / max(1, len(t) - 3), 1e-12)
        at = np.array([1.0, end**-exponent])
        means.append(float(at @ solution))
        variances.append(spread * (1 + float(at @ np.linalg.pinv(design.T @ design) @ at)))
        logs.append(-0.5 * len(t) * math.log(max(float(residual @ residual), 1e-12 * len(t))))
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    mean = float(weights @ np.array(means))
    variance = float(weights @ (np.array(variances) + (np.array(means) - mean) ** 2))
    return Forecast(mean, math.sqrt(variance))


def hopeless(curve: Sequence[tuple[float, float]], end: float, best: float) -> bool:
    """Return whether a trial will hardly become the best one: by two deviations of its forecast.

    Args:
        curve: (epochs, value) of its tests; more is better.
        end: epochs at which it ends.
        best: value of the best trial that has ended.
    """
    found = extrapolated(curve, end)
    return found is not None and found.value + 2 * found.deviation < best
