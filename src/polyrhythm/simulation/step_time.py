"""Compute times of steps: what all distributions have in common."""

from __future__ import annotations

from abc import abstractmethod
from random import Random

from polyrhythm.data.seeding import seed_for
from polyrhythm.specs import Config

STEP_TIMES = "polyrhythm.simulation.step_times"


class StepTime(Config):
    """A distribution of compute seconds; always positive."""

    @abstractmethod
    def draw(self, generator: Random) -> float:
        """Return the seconds of one step."""


def generator_for_rank(seed: int, rank: int) -> Random:
    """Return a rank's own stream, which depends on the seed and the rank alone."""
    return Random(seed_for("step time", seed, rank))
