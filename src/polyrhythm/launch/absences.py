"""Who of a run's ranks is gone, and whom a newcomer must be told of."""

from __future__ import annotations

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.strategies.cast import Cast


class Absences:
    """Kept by the launcher, or by worker 0 under torchrun.

    Args:
        cast: who does what.

    Attributes:
        any_yet: whether somebody who had been there was lost, be there a successor by now or not.
    """

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._gone: dict[int, Peer] = {}
        self.any_yet = False

    @property
    def servers(self) -> list[int]:
        """Ranks of servers that are lost, and of which no successor has all of its shards yet."""
        return [rank for rank in self._gone if rank in self._cast.servers]

    def lose(self, peer: Peer) -> None:
        """Enters a process that is gone, or a place that nobody has had so far."""
        self._gone[peer.rank] = peer
        self.any_yet = True

    def fill(self, rank: int) -> None:
        """Strikes off a rank that somebody has again."""
        self._gone.pop(rank, None)

    def news_for(self, newcomer: Peer) -> list[Peer]:
        """Gives those whom a newcomer would look for in vain."""
        return [peer for rank, peer in self._gone.items() if rank != newcomer.rank]
