"""Workers that are lost, and their successors."""

from __future__ import annotations

from dataclasses import dataclass

from polyrhythm.events.event import Event


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker is gone; the others go on.

    Attributes:
        worker: its index among the workers, from 0.
        rank: its rank.
        step: steps that it was known to have done since the run began; the servers may hold a few more.
    """

    worker: int
    rank: int
    step: int

    @property
    def text(self) -> str:
        """In words."""
        return f"worker {self.worker} (rank {self.rank}) is lost after step {self.step}, the others go on"


@dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    """The successor of a lost worker is there, and counts from now on.

    Attributes:
        worker: its index among the workers, from 0.
        rank: its rank.
    """

    worker: int
    rank: int

    @property
    def text(self) -> str:
        """In words."""
        return f"a successor of worker {self.worker} (rank {self.rank}) has joined"
