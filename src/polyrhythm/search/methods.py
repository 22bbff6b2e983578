"""What is tried next, and what is not worth going on with: pure rules over the trials that have ended.

`random`, `tpe` and the pruning rules of Hyperband, successive halving and the median are Optuna's; here is what it
lacks.

    evolution   E. Real, A. Aggarwal, Y. Huang, Q. Le, "Regularized evolution for image classifier architecture search",
                AAAI 2019, arXiv:1802.01548: of the P youngest, the best of S drawn ones has a child that differs in one
                place; who is older than the P youngest is no parent any more, however good.
    pbt         M. Jaderberg and others, "Population based training of neural networks", 2017, arXiv:1711.09846: a
                member among the worst fifth goes on from a checkpoint of one of the best fifth, with other parameters.
    curve       T. Domhan, J. Springenberg, F. Hutter, "Speeding up automatic hyperparameter optimization of deep neural
                networks by extrapolation of learning curves", IJCAI 2015, with one family of curves: a + b t^-c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from polyrhythm.search.space import Space

METHODS = ("grid", "random", "tpe", "hyperband", "evolution", "pbt", "darts")
PRUNERS = ("none", "median", "halving", "curve")


@dataclass(frozen=True)
class Parent:
    """A trial that may have children.

    Attributes:
        number: of the trial.
        parameters: its own.
        value: what it came to; more is better.
    """

    number: int
    parameters: Mapping[str, Any]
    value: float


def evolved(
    ended: Sequence[Parent], space: Space, population: int, sample: int, rng: Random
) -> dict[str, Any]:
    """Return the parameters of the next trial of regularised evolution.

    Args:
        ended: all trials so far, in the order in which they ended.
        space: of the parameters.
        population: how many of the youngest may be parents; while there are fewer, parameters are drawn.
        sample: how many of them are drawn, of whom the best is the parent.
        rng: decides what is drawn.
    """
    if len(ended) < population:
        return space.draw(lambda name, domain: domain.draw(rng))
    alive = list(ended[-population:])
    parent = max(rng.sample(alive, min(sample, len(alive))), key=lambda each: each.value)
    return space.mutate(parent.parameters, rng)


def succeeded(
    member: int, newest: Mapping[int, Parent], space: Space, rng: Random, share: float = 0.2
) -> tuple[Parent, dict[str, Any]]:
    """Return from which trial a member of a population goes on, and with which parameters.

    Args:
        member: which one; it has a trial that has ended.
        newest: of every member that has one, the newest trial that has ended.
        space: of the parameters.
        rng: decides what is drawn.
        share: of the members who are copied, and who copy.
    """
    own = newest[member]
    ranked = sorted(newest.values(), key=lambda each: (each.value, each.number))
    count = max(1, math.floor(share * len(ranked)))
    if len(ranked) < 2 or own not in ranked[:count]:
        return own, dict(own.parameters)
    better = [each for each in ranked[-count:] if each.value > own.value]
    if not better:
        return own, dict(own.parameters)
    parent = rng.choice(better)
    return parent, space.explore(parent.parameters, rng)


@dataclass(frozen=True)
class Forecast:
    """What a learning curve comes to.

    Attributes:
        value: expected at the end.
        deviation: of that.
    """

    value: float
    deviation: float


_EXPONENTS = np.linspace(0.1, 3.0, 30)
LEAST_POINTS = 4


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
