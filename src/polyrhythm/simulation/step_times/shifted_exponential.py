"""Shifted exponential: a time that every step needs, and a delay on top."""

from __future__ import annotations

from random import Random

from polyrhythm.simulation.step_time import StepTime
from polyrhythm.training.quantities import Positive


class ShiftedExponential(StepTime):
    """A constant and an exponential distribution, added.

    Attributes:
        shift: seconds that every step takes.
        mean: seconds of the delay on top; a step takes `shift + mean` on average.
    """

    shift: Positive
    mean: Positive

    def draw(self, generator: Random) -> float:
        return self.shift + generator.expovariate(1 / self.mean)
