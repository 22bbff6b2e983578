"""The communicator: all that a strategy may know about the network.

A communicator is a set of ranks, numbered from 0, and a message space of its own: messages on one are never
received on another, even between the same two ranks. The same protocol is real
(`transports/torch_distributed`) and simulated (`transports/simulated`); code written against it cannot
distinguish them. Its clock is real or virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.errors import RequestError


@cache
def all_ranks(size: int) -> tuple[int, ...]:
    """Return the ranks of a communicator: one object for the thousands of simulated ranks of a process."""
    return tuple(range(size))


class Clock(Protocol):
    """The time, in seconds; waiting passes it."""

    def now(self) -> float:
        """Seconds since the clock's own start."""

    def sleep(self, seconds: float, what: str = "") -> None:
        """Return `seconds` later on this clock; a timeline of simulated ranks shows `what` for that time."""


class NoSharedMemory(RequestError):
    """Ranks share no memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"these ranks share no memory: {reason}")
        self.reason = reason


class Handle(Protocol):
    """An operation in progress."""

    def done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self) -> Any:
        """Block until it is done; return its result, or raise its error."""


class Traffic(Protocol):
    """Bytes sent by a rank.

    Attributes:
        bytes_sent: bytes sent since it started. Collectives of a library, with invisible messages, count by
            the formula of their algorithm.
        bytes_inside: those of them that went to ranks of the same host, in simulations of clusters; else 0.
    """

    bytes_sent: int
    bytes_inside: int


class LentMemory(Protocol):
    """Memory of this rank from which messages to ranks of its host leave without being copied.

    A sent vector in this memory must not change before `lends` returns that no receiver reads it any more: a
    completed send does not imply that. Receivers must not change it.
    """

    def vector(self, like: Tensor) -> Tensor:
        """Return a vector of the size and dtype of another, with any content.

        It lies in ordinary memory, which is copied when it is sent, where there is no more of this.
        """

    def lends(self, tensor: Tensor) -> bool:
        """Return whether a receiver still reads a message with a tensor in the same vector as this one."""


class Communicator(Protocol):
    """One rank's end of a group of ranks.

    Every method names peers by their rank in this communicator. Sending to, or waiting for, a peer that is
    lost raises `PeerLost`; its `rank` is that among all ranks of the run.

    Attributes:
        rank: own rank.
        size: number of ranks.
        clock: clock of this network: real or virtual time.
        traffic: bytes sent by this rank through any of its communicators: one object for all of them.
    """

    rank: int
    size: int
    clock: Clock
    traffic: Traffic

    def send(self, to: int, message: Message) -> None:
        """Send a message; return when its tensor may be changed again, be it received or not."""

    def start_send(self, to: int, message: Message) -> Handle:
        """Start to send; the message's tensor must not change until the handle is done."""

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Wait for the next message with this tag, from `source` or from anyone; return its sender and it."""

    def receive_into(self, target: Tensor, source: int, tag: int = 0) -> Message:
        """Wait for the next message of `source` with this tag; return it.

        A payload of the size and dtype of `target` may be received there, without a copy; the message's tensor then
        is `target` itself. Its content is undefined until this returns, and if this raises.

        Args:
            target: memory for the payload, `(n,)`.
            source: rank of the sender.
            tag: tag of the message.
        """

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Like `receive`, but gives None where nothing has arrived yet."""

    def start(self, work: Callable[[], Any]) -> Handle:
        """Run `work` in the background of this rank; it may use this communicator."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add `tensor` up over all ranks, in place, to the same bits everywhere. All ranks must call it."""

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Start `all_reduce`; ranks must start theirs in the same order."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrite `tensor` with `root`'s. All ranks must call it."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def revoke(self) -> None:
        """End the use of this communicator and its subgroups: waiting on them raises `CollectiveBroken`, on all ranks.

        Rank 0 notifies all others. Any other rank notifies rank 0, which leaves its wait with an error, and must
        revoke in turn. So no rank waits for one that has given a collective up. Not for the communicator over
        all ranks.
        """

    def revoke_here(self) -> None:
        """As `revoke`, on this rank alone: no other is informed."""

    def revoke_without(self, rank: int) -> None:
        """Revoke this communicator, on this rank alone, once a member is known to be lost: now, if it is already.

        For the loss of rank 0, which can notify no others: without this, a rank would wait for one that knew
        of the loss earlier and gave the collective up.
        """

    def shared_vector(self, name: str, like: Tensor, *, later: bool = False) -> Tensor:
        """Return a vector that all ranks read and write: the same memory for all. All ranks must call it.

        It lives as long as a rank has it; the replacement of a lost rank finds it as the others have left it.

        Args:
            name: identifier among vectors of this communicator.
            like: tensor with the size and dtype, and on rank 0 the numbers to begin with.
            later: whether this rank is such a replacement.

        Raises:
            NoSharedMemory: raised on rank 0 and ranks without access, if not all are on one host, or it cannot be
                allocated.
            PeerLost: rank 0 is lost, and no other process has it.
        """

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """Make a vector of zeros of this rank's own for `all_reduce` to add up in place. All ranks must call it.

        Ranks of one host map each other's, so sums of it, or of a slice that is the same on all ranks, need no copy.

        Args:
            name: identifier among vectors of this communicator; used once.
            like: tensor with the size and dtype, the same on all ranks.

        Returns:
            `(n,)`, like `like`; None, on all ranks alike, where this gains nothing over ordinary memory.
        """

    def lent_memory(self) -> LentMemory | None:
        """Return the memory that this rank lends, one for all of its communicators; None where it lends none."""

    def regrouped(self, name: str, ranks: Sequence[int], generations: Sequence[int]) -> Communicator:
        """Make a `subgroup` of ranks as they are now, replacements of lost ones among them.

        Losses of their predecessors raise no `PeerLost` on it, even if this rank has not heard of them before.

        Args:
            name: see `subgroup`.
            ranks: see `subgroup`.
            generations: number of predecessors of each rank.
        """

    def subgroup(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Make the communicator of some of these ranks, this one among them, renumbered in the given order.

        Args:
            name: identifier among subgroups; the same on every member.
            ranks: members, as ranks of this communicator.
        """
