"""Places: which ranks of a run nobody has, and who would be next to have them."""

from __future__ import annotations

import threading

from polyrhythm.communication.transports.membership import Peer


class Places:
    """Places in a run; used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[int, int] = {}
        self._given: dict[int, int] = {}

    def vacate(self, peer: Peer) -> None:
        """Notes that a process is gone; news of one that has a successor already changes nothing."""
        with self._lock:
            if peer.incarnation >= self._given.get(peer.rank, 0):
                self._next[peer.rank] = peer.incarnation + 1

    def take(self, rank: int | None = None) -> Peer | None:
        """Gives a vacant rank to a new process; None if it is taken.

        Args:
            rank: that it must be; None: the lowest that is vacant.
        """
        with self._lock:
            if not self._next or (rank is not None and rank not in self._next):
                return None
            chosen = min(self._next) if rank is None else rank
            peer = Peer(chosen, self._next.pop(chosen))
            self._given[chosen] = peer.incarnation
            return peer
