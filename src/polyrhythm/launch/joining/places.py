"""Places: which ranks of a run nobody has, and who would be next to have them."""

from __future__ import annotations

from polyrhythm.communication.transports.membership import Peer


class Places:
    """Places of workers; used by one thread."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._given: dict[int, int] = {}

    def vacate(self, peer: Peer) -> None:
        """Notes that a process is gone; news of one that has a successor already changes nothing."""
        if peer.incarnation >= self._given.get(peer.rank, 0):
            self._next[peer.rank] = peer.incarnation + 1

    def take(self) -> Peer | None:
        """Gives the lowest vacant rank to a new process; None if all are taken."""
        if not self._next:
            return None
        rank = min(self._next)
        peer = Peer(rank, self._next.pop(rank))
        self._given[rank] = peer.incarnation
        return peer
