"""Communicators around another one: what they do not change themselves is the inner one's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.clock import Clock
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Message


class Around:
    """Passes everything on; see `Communicator`.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        """This rank."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._inner.size

    @property
    def clock(self) -> Clock:
        """The inner one's."""
        return self._inner.clock

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since it started."""
        return self._inner.bytes_sent

    def send(self, to: int, message: Message) -> None:
        """Sends."""
        self._inner.send(to, message)

    def start_send(self, to: int, message: Message) -> Handle:
        """Starts to send."""
        return self._inner.start_send(to, message)

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        return self._inner.receive(source, tag)

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Takes a message if one is there."""
        return self._inner.poll(source, tag)

    def start(self, work: Callable[[], Any]) -> Handle:
        """Runs `work` in the background."""
        return self._inner.start(work)

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all ranks."""
        self._inner.all_reduce(tensor)

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to add up over all ranks."""
        return self._inner.start_all_reduce(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites `tensor` with `root`'s."""
        self._inner.broadcast(tensor, root)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._inner.barrier()

    def regrouped(self, name: str, ranks: Sequence[int], incarnations: Sequence[int]) -> Communicator:
        """Makes the communicator of some of these ranks, as they are now."""
        return self._inner.regrouped(name, ranks, incarnations)

    def revoke(self) -> None:
        """Ends the use of this communicator."""
        self._inner.revoke()

    def revoke_here(self) -> None:
        """Ends the use of this communicator on this rank alone."""
        self._inner.revoke_here()

    def revoke_without(self, rank: int) -> None:
        """Ends the use of this communicator on this rank once another is lost."""
        self._inner.revoke_without(rank)

    def shared_vector(self, name: str, like: Tensor, *, later: bool = False) -> Tensor:
        """Gives a vector that all ranks read and write."""
        return self._inner.shared_vector(name, like, later=later)

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """Makes a vector that is added up where it lies."""
        return self._inner.vector_to_sum(name, like)

    def subgroup(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Makes the communicator of some of these ranks."""
        return self._inner.subgroup(name, ranks)


class RecordingCommunicator(Around):
    """Notes whom this rank hears when it would hear anyone. What subgroups receive is not noted.

    Args:
        inner: does the work.
        arrivals: where to note it.
    """

    def __init__(self, inner: Communicator, arrivals: Arrivals) -> None:
        super().__init__(inner)
        self._arrivals = arrivals

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        found, message = self._inner.receive(source, tag)
        if source is None:
            self._arrivals.note(found, message)
        return found, message
