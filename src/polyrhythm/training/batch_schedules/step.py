"""A staircase: batches grow to `growth` times their size at each of some points of the run.

    batch = first batch * growth^k,   k = how many of the points in `at` have been reached when the epoch begins

The points are shares of the run's epochs. With a constant learning rate this is, in lr / batch, the schedule
`step(at=…, gamma=1/growth)` of Smith and others; with `step(at=…, gamma=g)` next to it, AdaBatch; its plan is
that of a rate that falls to g / growth.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyrhythm.training.quantities import InnerFraction
from polyrhythm.training.schedule import BatchSchedule


class Step(BatchSchedule):
    """Keys of the staircase.

    Attributes:
        at: points at which batches grow, as shares of the run.
        growth: factor of one growth.
    """

    at: Annotated[tuple[InnerFraction, ...], Field(min_length=1)] = (0.5, 0.75)
    growth: int = Field(default=2, ge=2)

    def factor(self, epoch: int, epochs: int) -> int:
        stairs = sum(epoch >= share * epochs for share in self.at)
        return int(self.growth**stairs)
