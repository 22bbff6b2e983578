"""Exponential: how long a step takes yet does not depend on how long it has taken."""

from __future__ import annotations

from math import log
from random import Random

from polyrhythm.simulation.step_time import StepTime
from polyrhythm.training.quantities import Positive


class Exponential(StepTime):
    """An exponential distribution.

    Attributes:
        mean: seconds.
    """

    mean: Positive

    def draw(self, generator: Random) -> float:
        # As `expovariate` draws, without a call for each of millions of steps.
        while (seconds := -log(1.0 - generator.random()) / (1 / self.mean)) <= 0:
            pass
        return seconds
