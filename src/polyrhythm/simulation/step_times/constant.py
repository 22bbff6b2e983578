"""Constant: every step takes the same time."""

from __future__ import annotations

from random import Random

from polyrhythm.simulation.step_time import StepTime
from polyrhythm.training.quantities import Positive


class Constant(StepTime):
    """Every step takes the same time.

    Attributes:
        seconds: seconds of every step.
    """

    seconds: Positive

    def draw(self, generator: Random) -> float:
        return self.seconds
