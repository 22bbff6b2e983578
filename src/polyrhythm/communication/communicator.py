"""The communicator: all that a strategy may know about the network.

A communicator is a set of ranks, numbered from 0, and a message space of its own: what is sent on one is never
received on another, even between the same two ranks. The same protocol is real (`transports/torch_distributed`)
and simulated (`transports/simulated`); code written against it cannot tell which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from polyrhythm.communication.clock import Clock
from polyrhythm.communication.message import Message


class Handle(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Tells whether `wait` would return at once."""

    def wait(self) -> Any:
        """Blocks until it is done and gives its result; raises what it raised."""


class Communicator(Protocol):
    """One rank's end of a group of ranks.

    Every method names peers by their rank in this communicator. Whatever talks to a peer that is gone raises
    `PeerLost`, whose `rank` counts among all ranks of the run.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def clock(self) -> Clock:
        """The clock that goes with this network."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent through any communicator since it started.

        Collectives of a library, whose messages nobody sees, count by their formula.
        """

    def send(self, to: int, message: Message) -> None:
        """Sends; returns when the message's tensor may be changed again."""

    def start_send(self, to: int, message: Message) -> Handle:
        """Starts to send; the message's tensor must not change until the handle is done."""

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for the next message with this tag, from `source` or from anyone; gives its sender and it."""

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Like `receive`, but gives None where nothing has arrived yet."""

    def start(self, work: Callable[[], Any]) -> Handle:
        """Runs `work` in the background of this rank; it may use this communicator."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds `tensor` up over all ranks, in place, to the same bits everywhere. All ranks must call it."""

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Starts `all_reduce`; ranks must start theirs in the same order."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites `tensor` with `root`'s. All ranks must call it."""

    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    def revoke(self) -> None:
        """Ends the use of this communicator and of its parts: whoever waits on them gets `CollectiveBroken`.

        Rank 0 tells all others; any other rank tells rank 0, which finds it broken and is to do the same. So
        nobody waits for those who have given a collective up. Has no meaning for the communicator over all ranks.
        """

    def revoke_here(self) -> None:
        """As `revoke`, on this rank alone: nobody is told."""

    def revoke_without(self, rank: int) -> None:
        """Has this communicator revoked, on this rank alone, once a member is lost: now, if it is already.

        So ends who waits for another that has heard of that loss earlier, and given a collective up; rank 0 can be
        lost without anybody left to tell all.

        Args:
            rank: of the member, in this communicator.
        """

    def shared_vector(self, name: str, like: Tensor) -> Tensor:
        """Makes a vector of zeros that all ranks read and write: the same memory for all. All ranks must call it.

        Args:
            name: tells it apart from other vectors of this communicator; used once.
            like: gives size and dtype.

        Raises:
            NoSharedMemory: on all ranks, if not all are on one host, or it cannot be had.
        """

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """Makes a vector of zeros of this rank's own, which `all_reduce` adds up where it lies. All ranks must call it.

        Ranks of one host see each other's, so it and slices of it, the same on all ranks, are not copied on the way.

        Args:
            name: tells it apart from other vectors of this communicator; used once.
            like: gives size and dtype, the same on all ranks.

        Returns:
            None, on all ranks alike, where any other memory serves as well.
        """

    def regrouped(self, name: str, ranks: Sequence[int], incarnations: Sequence[int]) -> Communicator:
        """Makes a `subgroup` of those who are there now, successors of lost ranks among them.

        Who came before them is gone, also if nobody has told this rank so; that is no news on the new communicator.

        Args:
            name: as in `subgroup`.
            ranks: as in `subgroup`.
            incarnations: how many have had each one's number before it.
        """

    def subgroup(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Makes the communicator of some of these ranks, this one among them, renumbered in the given order.

        Args:
            name: tells it apart from other subgroups; the same on every member.
            ranks: its members, as ranks of this communicator.
        """
