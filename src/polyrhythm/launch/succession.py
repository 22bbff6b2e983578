"""When a lost worker gets a successor."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.transports.membership import Peer

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class Succession:
    """Who is to be started again, and when: half a second after its first death, twice as long after every other.

    Args:
        restarts: how many successors there may be in a run.

    Attributes:
        left: how many there may still be.
    """

    def __init__(self, restarts: int) -> None:
        self.left = restarts
        self._deaths: Counter[int] = Counter()
        self._due: list[tuple[float, Peer]] = []

    def lose(self, peer: Peer, now_s: float) -> float | None:
        """Notes a loss; gives the seconds until a successor starts, or None if there will be none."""
        if not self.left:
            return None
        self.left -= 1
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** self._deaths[peer.rank], _LONGEST_PAUSE_S)
        self._deaths[peer.rank] += 1
        self._due.append((now_s + pause_s, Peer(peer.rank, peer.incarnation + 1)))
        return pause_s

    def take_due(self, now_s: float) -> list[Peer]:
        """Gives those who must start now, each once."""
        due = [peer for at_s, peer in self._due if at_s <= now_s]
        self._due = [entry for entry in self._due if entry[0] > now_s]
        return due

    def next_s(self) -> float | None:
        """Gives when the next one must start, if there is one."""
        times_s = [at_s for at_s, _ in self._due]
        return min(times_s) if times_s else None

    def cancel(self) -> None:
        """Starts nobody any more."""
        self._due.clear()
        self.left = 0
