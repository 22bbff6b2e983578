"""Partition: the ranks fall into groups that cannot reach each other for a time; see `cut`."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Annotated

from pydantic import Field, model_validator

from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.fault import Fault, FaultTarget, FaultyRun, check_rank, cut_links
from polyrhythm.training.quantities import NonNegative, Positive


class Partition(Fault):
    """All links between groups are cut.

    Attributes:
        groups: groups of ranks, as in `groups=[[0, 4], [1, 2]]`; ranks that are in none of them are one more group.
        from_s: virtual seconds.
        to_s: virtual seconds.
        broken_after_s: seconds after which the connections are lost; default: about the timeout of Linux.
    """

    groups: Annotated[tuple[tuple[int, ...], ...], Field(min_length=1)]
    from_s: NonNegative = 0.0
    to_s: float = Field(default=inf, gt=0)
    broken_after_s: Positive = 900.0

    @model_validator(mode="after")
    def _check(self) -> Partition:
        named = [rank for group in self.groups for rank in group]
        if len(named) != len(set(named)):
            raise RequestError("fault partition: a rank is in two groups")
        if self.to_s <= self.from_s:
            raise RequestError(
                f"fault partition: to_s {self.to_s:g} must be later than from_s {self.from_s:g}"
            )
        return self

    def check(self, ground: FaultTarget) -> None:
        for group in self.groups:
            for rank in group:
                check_rank(self, ground, rank)

    def holds_up_s(self, step_s: float) -> float:
        return self.to_s - self.from_s if self.to_s < inf else 0.0

    def begin(self, run: FaultyRun, random: Random) -> None:
        side = {rank: number for number, group in enumerate(self.groups) for rank in group}

        def apart(one: int, other: int) -> bool:
            return side.get(one, -1) != side.get(other, -1)

        cut_links(run, apart, self.from_s, self.to_s, self.broken_after_s)
