"""Slow: a worker's steps take longer for a time."""

from __future__ import annotations

from math import inf
from random import Random

from pydantic import Field, model_validator

from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.fault import Fault, FaultTarget, FaultyRun, check_rank
from polyrhythm.training.quantities import NonNegative, Positive


class Slow(Fault):
    """Steps that begin within a time are longer.

    Attributes:
        rank: a worker's.
        factor: factor by which they are.
        from_s: virtual seconds.
        to_s: virtual seconds; default: to the end.
    """

    rank: int
    factor: Positive
    from_s: NonNegative = 0.0
    to_s: float = Field(default=inf, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Slow:
        if self.to_s <= self.from_s:
            raise RequestError(f"fault slow: to_s {self.to_s:g} must be later than from_s {self.from_s:g}")
        return self

    def check(self, ground: FaultTarget) -> None:
        """Check that the rank computes."""
        check_rank(self, ground, self.rank)
        if self.rank not in ground.roles.workers:
            raise RequestError(f"fault {self}: rank {self.rank} is a server, which has no compute time")

    def holds_up_s(self, step_s: float) -> float:
        """Return the time of some slow steps in a row."""
        return 10 * self.factor * step_s

    def begin(self, run: FaultyRun, random: Random) -> None:
        run.slow(self.rank, lambda: self.factor if self.from_s <= run.time.now() < self.to_s else 1.0)
