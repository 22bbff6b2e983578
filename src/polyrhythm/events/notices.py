"""What the user should know, in words."""

from __future__ import annotations

from dataclasses import dataclass

from polyrhythm.events.event import Event


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Something that the user should know; training goes on."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Straggler(Notice):
    """A worker has become a straggler, or is none any more, as its text says.

    Attributes:
        worker: its index among the workers, from 0.
        slowdown: its own time of a step over the median of all workers.
    """

    worker: int
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class ServerLost(Notice):
    """A server is gone; who has its shards as well goes on with them.

    Attributes:
        rank: its rank.
    """

    rank: int


@dataclass(frozen=True, kw_only=True)
class ServerJoined(Notice):
    """The successor of a lost server has all of its shards: another may be lost.

    Attributes:
        rank: its rank.
    """

    rank: int


@dataclass(frozen=True, kw_only=True)
class Restarted(Notice):
    """All ranks are started again, since one was lost that could not be done without.

    Attributes:
        updates_lost: workers' steps that are known to have been done since the checkpoint.
    """

    updates_lost: int
