"""What the collectives of one communicator have in common, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.transports.collective_broken import CollectiveBroken


class MemberCollectives(Protocol):
    """One member's side. Tensors live on the CPU; all members start the same collectives in the same order.

    What is raised, by a call or by a handle's `wait`: `CollectiveBroken` if a member is gone, on all members and from
    then on.
    """

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> Handle:
        """Starts to add up over all members, in place; `finish` is called when it has ended well."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all members, in place."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrites a tensor with member `root`'s."""

    def barrier(self) -> None:
        """Returns when all members have called it."""

    def give_up(self, reason: CollectiveBroken) -> None:
        """Ends all collectives, also those under way, here and on the other members; called on any thread."""

    def close(self) -> None:
        """Leaves; the others must not wait for this member any more."""
