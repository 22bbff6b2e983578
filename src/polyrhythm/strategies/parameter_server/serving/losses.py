"""Pushers that are lost, or were let go, until a successor comes."""

from __future__ import annotations

from polyrhythm.errors import RunError


class Losses:
    """Counts one server's lost pushers against how many may be lost.

    Args:
        spares: how many may be lost at once; 0: the run decides.
        what: can spare them.

    Attributes:
        ejected: pushers that were let go, once each time.
    """

    def __init__(self, spares: int, what: str) -> None:
        self.ejected = 0
        self._spares = spares
        self._what = what
        self._lost: set[int] = set()
        self._let_go: set[int] = set()

    def lose(self, rank: int) -> None:
        """Enters a pusher that is gone without having left."""
        self._lost.add(rank)

    def let_go(self, rank: int) -> None:
        """Enters a pusher that is told to leave."""
        self.ejected += 1
        self._let_go.add(rank)

    def was_let_go(self, rank: int) -> bool:
        """Whether a pusher was told to leave, and no successor has come."""
        return rank in self._let_go

    def replace(self, rank: int) -> None:
        """A successor is here."""
        self._lost.discard(rank)
        self._let_go.discard(rank)

    def check(self) -> None:
        """Makes sure that enough are left.

        Raises:
            RunError: more are lost than can be spared.
        """
        if 0 < self._spares < len(self._lost):
            ranks = ", ".join(map(str, sorted(self._lost)))
            raise RunError(
                f"{len(self._lost)} workers are lost (ranks {ranks}), and {self._what} can spare {self._spares}: "
                "continue with --resume, or start anew with more spare ones"
            )
