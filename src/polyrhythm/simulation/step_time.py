"""How long a step of a worker computes: what every distribution has in common."""

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
        """Draws the seconds of one step."""


def generator_for_rank(seed: int, rank: int) -> Random:
    """Gives a rank's own stream: it depends on the seed and the rank alone, whoever else computes."""
    return Random(seed_for("step time", seed, rank))
