"""Kill: a rank, or all ranks of a host, end at once; replacements may take their places."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Literal

from pydantic import model_validator

from polyrhythm.errors import RequestError
from polyrhythm.roles.world import LEADER
from polyrhythm.simulation.injection.fault import Fault, FaultTarget, FaultyRun, check_rank
from polyrhythm.training.quantities import Count, NonNegative, Positive


class Kill(Fault):
    """Ranks are killed.

    Attributes:
        rank: number of the rank, or `any`: a random living worker other than the coordinator, each time.
        host: index of a host, to kill all of its ranks; instead of `rank`.
        at_s: time in virtual seconds.
        after_step: number of the worker's steps before its death, with those of its replacements; instead of `at_s`.
        every_s: mean seconds between repeated deaths, exponentially distributed; instead of `at_s`.
        restart_after_s: seconds until a replacement starts; default: none starts.
    """

    rank: int | Literal["any"] | None = None
    host: int | None = None
    at_s: Positive | None = None
    after_step: Count | None = None
    every_s: Positive | None = None
    restart_after_s: NonNegative | None = None

    @model_validator(mode="after")
    def _check(self) -> Kill:
        if (self.rank is None) == (self.host is None):
            raise RequestError("fault kill: give either rank or host")
        if [self.at_s, self.after_step, self.every_s].count(None) != 2:
            raise RequestError("fault kill: give one of at_s, after_step and every_s")
        if self.after_step is not None and not isinstance(self.rank, int):
            raise RequestError("fault kill: after_step needs the number of one rank")
        return self

    def check(self, ground: FaultTarget) -> None:
        if self.host is not None and self.host not in ground.host_of:
            raise RequestError(f"fault {self}: no rank is on host {self.host}")
        if self.rank == "any" and len(ground.roles.workers) < 2:
            raise RequestError(f"fault {self}: there is no worker but the one that leads")
        if isinstance(self.rank, int):
            check_rank(self, ground, self.rank)
        if self.after_step is not None and self.rank not in ground.roles.workers:
            raise RequestError(f"fault {self}: rank {self.rank} is a server, which takes no steps")

    def kills(self, rank: int, ground: FaultTarget) -> bool:
        """Return whether this may kill a rank; `any` is not taken to mean one in particular."""
        return self.rank == rank or (self.host is not None and ground.host_of[rank] == self.host)

    def returns_rank(self, rank: int, ground: FaultTarget) -> bool:
        return not self.kills(rank, ground) or self.restart_after_s is not None

    def holds_up_s(self, step_s: float) -> float:
        """Return how long it takes until a replacement starts."""
        return self.restart_after_s or 0.0

    def begin(self, run: FaultyRun, random: Random) -> None:
        kill = partial(self._kill, run, random)
        if self.at_s is not None:
            run.time.at(self.at_s, kill)
        elif self.every_s is not None:
            run.repeat(partial(random.expovariate, 1 / self.every_s), kill)
        elif self.after_step is not None:
            assert isinstance(self.rank, int)
            run.when_done(self.rank, self.after_step, kill)

    def _kill(self, run: FaultyRun, random: Random) -> None:
        for rank in self._victims(run, random):
            run.kill(rank)
            if self.restart_after_s is not None:
                run.time.at(run.time.now() + self.restart_after_s, partial(run.restart, rank))

    def _victims(self, run: FaultyRun, random: Random) -> list[int]:
        if self.host is not None:
            return run.living([rank for rank, host in enumerate(run.host_of) if host == self.host])
        if self.rank == "any":
            living = run.living([rank for rank in run.roles.workers if rank != LEADER])
            return [random.choice(living)] if living else []
        assert isinstance(self.rank, int)
        return run.living([self.rank])
