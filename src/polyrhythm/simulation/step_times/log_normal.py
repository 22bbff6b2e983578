"""Log-normal: many small delays that multiply; a long tail of slow steps."""

from __future__ import annotations

from math import exp, log
from random import Random

from pydantic import model_validator

from polyrhythm.errors import RequestError
from polyrhythm.simulation.step_time import StepTime
from polyrhythm.training.quantities import NonNegative, Positive


class LogNormal(StepTime):
    """The exponential of a normal distribution; its median or its mean is given.

    Attributes:
        median: seconds.
        mean: seconds; `median * exp(sigma² / 2)`.
        sigma: standard deviation of the logarithm.
    """

    median: Positive | None = None
    mean: Positive | None = None
    sigma: NonNegative

    @model_validator(mode="after")
    def _check(self) -> LogNormal:
        if (self.median is None) == (self.mean is None):
            raise RequestError("step time log_normal: give either its median or its mean, in seconds")
        return self

    def draw(self, generator: Random) -> float:
        if self.median is not None:
            center = log(self.median)
        else:
            assert self.mean is not None
            center = log(self.mean) - self.sigma**2 / 2
        return exp(generator.normalvariate(center, self.sigma))
