"""Images to a target that a run has not reached, from its tests so far, with the uncertainty of that.

    error(k) = 1 / (b0 k + b1) + b2,  all b at least 0, k images

Peng, Bao, Chen, Wu, Guo, "Optimus: An Efficient Dynamic Resource Scheduler for Deep Learning Clusters", EuroSys 2018.
The error is a test loss, or 1 - accuracy. For each of a row of b2 the rest is linear in `1 / (error - b2)`, weighted so
that deviations count as they do in the error; the best b2 wins. Intervals are those of a bootstrap over residuals.

Beside it, where a learning curve ends and whether a trial can still become the best, after T. Domhan, J. Springenberg,
F. Hutter, "Speeding up automatic hyperparameter optimization of deep neural networks by extrapolation of learning
curves", IJCAI 2015, with one family of curves: a + b t^-c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEWEST_TESTS = 4
"""Three numbers are fitted: with fewer tests nothing is left to tell how well."""
_FLOORS, _RESAMPLES = 64, 200
_EXPONENTS = np.linspace(0.1, 3.0, 30)
LEAST_POINTS = 4
_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A fitted curve: `b0`, `b1` and `b2` of the module's formula."""

    b0: float
    b1: float
    b2: float

    def error(self, images: float) -> float:
        """Return the error after so many images."""
        below = self.b0 * images + self.b1
        return 1 / below + self.b2 if below > 0 else math.inf

    def images_to(self, error: float) -> float:
        """Return the images until an error is reached; infinite if it never is."""
        if error <= self.b2 or self.b0 <= 0:
            return math.inf
        return max(0.0, (1 / (error - self.b2) - self.b1) / self.b0)


def fit(images: Sequence[float], errors: Sequence[float]) -> Curve:
    """Fit a curve to at least two tests.

    Args:
        images: training images before each test, increasing.
        errors: of the tests, positive.
    """
    return _fit(np.asarray(images, dtype=np.float64), np.asarray(errors, dtype=np.float64))


def images_to(
    images: Sequence[float], errors: Sequence[float], error: float, seed: int = 0
) -> tuple[float, float, float]:
    """Return the images to an error: by the fitted curve, and the ends of an interval of 90 %; infinite if never.

    Args:
        images: training images before each test, increasing.
        errors: of the tests, at least `FEWEST_TESTS`.
        error: that is to be reached.
        seed: of the resampling.
    """
    assert len(images) == len(errors) >= FEWEST_TESTS
    at, seen = np.asarray(images, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    curve = _fit(at, seen)
    fitted = np.asarray([curve.error(each) for each in at])
    # Residuals of a fit are smaller than those of the truth by what its three numbers take up.
    residuals = (seen - fitted) * math.sqrt(len(at) / (len(at) - 3))
    generator = np.random.default_rng(seed)
    found = sorted(
        _fit(at, np.maximum(fitted + generator.choice(residuals, len(at)), 1e-9)).images_to(error)
        for _ in range(_RESAMPLES)
    )
    low, high = found[round(0.05 * (_RESAMPLES - 1))], found[round(0.95 * (_RESAMPLES - 1))]
    return curve.images_to(error), low, high


def _fit(images: _Numbers, errors: _Numbers) -> Curve:
    scale = float(images.max())
    k = images / scale
    floors = np.linspace(0, 0.999 * float(errors.min()), _FLOORS)[:, None]
    gaps = errors[None, :] - floors
    weights, inverse = gaps**4, 1 / gaps  # d error = gap² d(1 / gap)
    total, slope_sum = weights.sum(1), (weights * k).sum(1)
    squares, height = (weights * k * k).sum(1), (weights * inverse).sum(1)
    product = (weights * k * inverse).sum(1)
    spread = np.maximum(total * squares - slope_sum**2, 1e-300)
    b0 = (total * product - slope_sum * height) / spread
    b1 = (height - b0 * slope_sum) / total
    b0 = np.where(b1 < 0, product / squares, b0)
    b1 = np.where(b1 < 0, 0.0, b1)
    b1 = np.where(b0 < 0, height / total, b1)
    b0 = np.where(b0 < 0, 0.0, b0)
    missed = ((errors[None, :] - 1 / (b0[:, None] * k + b1[:, None]) - floors) ** 2).sum(1)
    best = int(missed.argmin())
    return Curve(float(b0[best]) / scale, float(b1[best]), float(floors[best, 0]))


@dataclass(frozen=True)
class Forecast:
    """What a learning curve comes to.

    Attributes:
        value: expected at the end.
        deviation: of that.
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
