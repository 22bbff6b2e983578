"""Normal: steps vary evenly about their mean."""

from __future__ import annotations

from random import Random

from pydantic import model_validator

from polyrhythm.errors import RequestError
from polyrhythm.simulation.step_time import StepTime
from polyrhythm.training.quantities import NonNegative, Positive


class Normal(StepTime):
    """A normal distribution; draws that are not positive are drawn again.

    Attributes:
        mean: seconds.
        deviation: standard deviation in seconds, at most a third of the mean: then one draw in 700 is drawn again,
            and the mean stays.
    """

    mean: Positive
    deviation: NonNegative

    @model_validator(mode="after")
    def _check(self) -> Normal:
        if self.deviation > self.mean / 3 * (1 + 1e-9):  # 0.1 is a third of 0.3
            raise RequestError(
                f"step time normal: deviation {self.deviation:g} is more than a third of the mean {self.mean:g}, "
                "so that times would be negative: use log_normal"
            )
        return self

    def draw(self, generator: Random) -> float:
        while (seconds := generator.normalvariate(self.mean, self.deviation)) <= 0:
            pass
        return seconds
