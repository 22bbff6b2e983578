"""Backup workers: an update is the mean of the first N gradients of its step; those of the b slowest are dropped.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, arXiv 1604.00981.

    w' = w - lr * (1/N) * sum of the first N gradients of the current step        N + b pushers

b = `spare`; N is the rest. A gradient of an earlier step is dropped, and its pusher continues with the
current step,
leaving out the ones between. What is applied is never stale. With b = 0 this is the synchronous consistency.

Departure from the paper: where there are several servers, every shard has its own first N.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyrhythm.strategies.parameter_server.consistency.synchronous import SynchronousGate
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision, Gate, check_fewer
from polyrhythm.strategies.state import StateField, reset


class Backup(Consistency):
    """The slowest are not waited for.

    Attributes:
        spare: number of pushers that are not waited for.
    """

    drops: ClassVar[bool] = True

    spare: int = Field(default=1, ge=0)

    def check(self, pushers: int) -> None:
        """Reject sparing all pushers; a single pusher cannot be spared, and is plain training."""
        if pushers > 1:
            check_fewer(f"{self}: spare", self.spare, pushers)

    def in_step(self) -> bool:
        return self.spare == 0

    def gathers(self, pushers: int) -> int:
        return max(1, pushers - self.spare)

    def updates_per_step(self, pushers: int) -> int:
        return 1

    def spares(self, pushers: int) -> int:
        return pushers - self.gathers(pushers) if self.spare else pushers

    def gate(self, pushers: int) -> Gate:
        return BackupGate(pushers, self.gathers(pushers)) if self.spare else SynchronousGate(pushers)


class BackupGate(Gate):
    """Counts the gradients of the current step; its step is the one of all pushers."""

    fields = (
        StateField("step", int, reset(lambda start: start.step, "server")),
    )  # held gradients are pushed again

    def __init__(self, pushers: int, needed: int) -> None:
        self._needed = needed
        self._present = set(range(pushers))
        self._held: set[int] = set()
        self._step = 0

    def ask(self, pusher: int, step: int) -> Decision:
        return Decision(answer=(pusher,), step=self._step)

    def arrive(self, pusher: int, step: int) -> Decision:
        """Drop a late gradient; else hold it, or apply all if enough are there."""
        if step < self._step:
            return Decision(drop=(pusher,), answer=(pusher,), step=self._step)
        self._held.add(pusher)
        return self._decide()

    def leave(self, pusher: int) -> Decision:
        """Drop the pushes of a failed pusher, and wait for at most the present ones."""
        self._present.discard(pusher)
        drop = (pusher,) if pusher in self._held else ()
        self._held.discard(pusher)
        return self._decide(drop)

    def join(self, pusher: int) -> None:
        self._present.add(pusher)

    def _decide(self, drop: tuple[int, ...] = ()) -> Decision:
        if not self._held or len(self._held) < min(self._needed, len(self._present)):
            return Decision(drop=drop)
        first = tuple(sorted(self._held))
        self._held = set()
        self._step += 1
        return Decision(apply=first, answer=first, drop=drop, step=self._step)
