"""Common parts of one communicator's collectives, and the error raised where one cannot end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.errors import PeerLost

UNKNOWN_RANK = -1
REVOKED = "another rank has given it up"


class CollectiveBroken(PeerLost):
    """A rank that a collective needs has failed or left.

    Args:
        reason: symptom of the loss.
        rank: failed rank, among all ranks of the run; `UNKNOWN_RANK` where the library does not report it.
    """

    def __init__(self, reason: str, rank: int = UNKNOWN_RANK) -> None:
        super(PeerLost, self).__init__(f"a collective broke, so a rank is gone: {reason}")
        self.reason = reason
        self.rank = rank


def ranks_to_notify(rank: int, size: int) -> range:
    """Return the ranks to notify of a revoked communicator: from the first member all others, else the first."""
    return range(1, size) if rank == 0 else range(1)


class MemberCollectives(Protocol):
    """One member's side. Tensors live on the CPU; all members start the same collectives in the same order.

    What is raised, by a call or by a handle's `wait`: `CollectiveBroken` if a member is gone, on all members and from
    then on.
    """

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> Handle:
        """Start to add up over all members, in place; `finish` is called when it has ended well."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up over all members, in place."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a tensor with member `root`'s."""

    def barrier(self) -> None:
        """Return when all members have called it."""

    def give_up(self, reason: CollectiveBroken) -> None:
        """End all collectives, also those in progress, here and on the other members; called on any thread."""

    def close(self) -> None:
        """Leave; the others must not wait for this member any more."""
