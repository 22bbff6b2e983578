"""A staircase: the rate falls to `gamma` of itself at each of some points of the run.

    factor = gamma^k,   k = how many of the points in `at` have been reached

The points are shares of the whole run, warm-up included, so that they keep their place when the run gets
longer.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyrhythm.training.quantities import InnerFraction, Positive
from polyrhythm.training.schedule import Schedule


class Step(Schedule):
    """Keys of the staircase.

    Attributes:
        at: points at which the rate falls, as shares of the run.
        gamma: factor of each fall.
    """

    at: Annotated[tuple[InnerFraction, ...], Field(min_length=1)] = (0.5, 0.75)
    gamma: Positive = 0.1

    def decay(self, step: float, warmup_steps: int, total_steps: float) -> float:
        falls: int = sum(step >= share * total_steps for share in self.at)
        return self.gamma**falls
