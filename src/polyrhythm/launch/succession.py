"""Which ranks of a run are gone, and when a lost rank gets a successor.

`Absences` lists the processes that are gone, of which a newcomer must be told. `Succession` starts a lost
rank again after half a second, and after twice as long whenever its last process died soon.
"""

from __future__ import annotations

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.strategies.role_assignment import RoleAssignment


class Absences:
    """Kept by the launcher, or by worker 0 under torchrun.

    Args:
        cast: who does what.

    Attributes:
        any_yet: whether somebody who had been there was lost, be there a successor by now or not.
    """

    def __init__(self, cast: RoleAssignment) -> None:
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


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
_LIVES = 4
"""A successor that lives for so many of the pauses before it has done well: the next pause is a short one again."""


class Succession:
    """Who is to be started again, and when: after half a second, and twice as long whenever the last one died soon.

    Args:
        restarts: how many successors there may be in a run.

    Attributes:
        left: how many there may still be.
    """

    def __init__(self, restarts: int) -> None:
        self.left = restarts
        self._last: dict[int, tuple[float, float]] = {}
        self._due: list[tuple[float, Peer]] = []

    def lose(self, peer: Peer, now_s: float, *, awaited: bool = False) -> float | None:
        """Notes a loss; gives the seconds until a successor starts, or None if there will be none.

        Args:
            peer: who is lost.
            now_s: when.
            awaited: whether all others wait for the successor: it starts at once, unless the last one died soon.
        """
        if not self.left:
            return None
        self.left -= 1
        pause_s = self._pause_s(peer.rank, now_s, awaited=awaited)
        self._last[peer.rank] = pause_s, now_s + pause_s
        self._due.append((now_s + pause_s, Peer(peer.rank, peer.incarnation + 1)))
        return pause_s

    def take_due(self, now_s: float) -> list[Peer]:
        """Gives those who must start now, each once."""
        due = [peer for at_s, peer in self._due if at_s <= now_s]
        self._due = [entry for entry in self._due if entry[0] > now_s]
        return due

    @property
    def awaited(self) -> set[int]:
        """The ranks that are to be started again."""
        return {peer.rank for _, peer in self._due}

    def next_s(self) -> float | None:
        """Gives when the next one must start, if there is one."""
        times_s = [at_s for at_s, _ in self._due]
        return min(times_s) if times_s else None

    def cancel(self, spare: int | None = None) -> None:
        """Starts nobody any more.

        Args:
            spare: the rank whose successor is started all the same, if it is due.
        """
        self._due = [entry for entry in self._due if entry[1].rank == spare]
        self.left = 0

    def _pause_s(self, rank: int, now_s: float, *, awaited: bool) -> float:
        if not self._died_soon(rank, now_s):
            return 0.0 if awaited else FIRST_PAUSE_S
        pause_s, _ = self._last[rank]
        return min(2 * pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S

    def _died_soon(self, rank: int, now_s: float) -> bool:
        if rank not in self._last:
            return False
        pause_s, started_at_s = self._last[rank]
        return now_s - started_at_s < _LIVES * (pause_s or FIRST_PAUSE_S)
