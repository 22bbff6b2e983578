"""What all transports raise when a collective cannot end."""

from __future__ import annotations

from polyrhythm.errors import PeerLost

UNKNOWN_RANK = -1
REVOKED = "another rank has given it up"


class CollectiveBroken(PeerLost):
    """A rank that a collective needs is gone.

    Args:
        reason: how it was noticed.
        rank: who is gone, among all ranks of the run; `UNKNOWN_RANK` where the library does not say.
    """

    def __init__(self, reason: str, rank: int = UNKNOWN_RANK) -> None:
        super(PeerLost, self).__init__(f"a collective broke, so a rank is gone: {reason}")
        self.reason = reason
        self.rank = rank


def revoke_tells(rank: int, size: int) -> range:
    """Gives whom a member tells that it has revoked a communicator: all others if it is the first, else the first."""
    return range(1, size) if rank == 0 else range(1)
