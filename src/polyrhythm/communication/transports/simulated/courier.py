"""Messages on their way between simulated ranks, and who carries them."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from polyrhythm.communication.message import Message
from polyrhythm.communication.transports.simulated.network import Network
from polyrhythm.communication.transports.simulated.rank import SimulatedRank
from polyrhythm.communication.transports.simulated.virtual_time import Task, running


class Parcel:
    """A message on its way, and its sender's handle on it.

    Attributes:
        source: its sender.
        to: its receiver.
        context: of the communicator.
        message: what arrives.
        nbytes: on the links.
    """

    __slots__ = ("_left", "_waiter", "context", "message", "nbytes", "source", "to")

    def __init__(
        self, source: SimulatedRank, to: SimulatedRank, context: int, message: Message, nbytes: int
    ) -> None:
        self.source = source
        self.to = to
        self.context = context
        self.message = message
        self.nbytes = nbytes
        self._left = False
        self._waiter: Task | None = None

    def sent(self) -> None:
        """Called when the message has left; that of a sender killed meanwhile never does."""
        if not self.source.alive:
            return
        self._left = True
        if self._waiter is not None:
            self._waiter.switch()

    def arrive(self) -> None:
        """Called when the last byte is there, if it has left."""
        if self._left:
            self.to.deliver(self.context, self.source, self.message)

    def done(self) -> bool:
        """Whether the message has left."""
        return self._left

    def wait(self) -> None:
        """Parks until the message has left."""
        if not self._left:
            time = self.source.cluster.time
            self._waiter = running()
            time.park("a message to leave", self._waiter)


class Courier(Protocol):
    """Takes messages over the links, where more may happen to them than that they start now and arrive."""

    def carry(self, parcel: Parcel) -> None:
        """Starts now: calls the parcel's `sent` when it has left, and `arrive` when it is there."""

    def tell_loss(self, gone: SimulatedRank, to: SimulatedRank) -> None:
        """Lets a rank hear that another is gone, after all that had left it."""


def tell_loss(network: Network, gone: SimulatedRank, to: SimulatedRank) -> None:
    """Lets a rank hear that another is gone, one latency later, as the end of a TCP connection takes."""
    time = gone.cluster.time
    time.at(time.now() + network.alpha_s(gone.rank, to.rank), partial(to.hear_of_loss, gone))
