"""Membership: the processes of a run, as a rank's links of any kind query and report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from polyrhythm.communication.message import Message, RefusedMessage
from polyrhythm.communication.transports.inbox import Target


class Peer(NamedTuple):
    """A process of a run: its rank, and the number of its predecessors."""

    rank: int
    generation: int


class Membership(Protocol):
    """State of the others on a rank, as its links query and report it; called by many threads.

    Attributes:
        most_bytes: largest payload of a message in this run.
        patience_s: seconds for which another host may be unreachable before its ranks count as lost.
    """

    most_bytes: int
    patience_s: float

    def generation(self, rank: int) -> int:
        """The newest generation of a rank that has opened a link to this one; 0 before any has."""

    def is_lost(self, rank: int) -> bool:
        """Return whether a rank is known to be gone."""

    def admit(self, peer: Peer) -> None:
        """A peer asks for a link.

        Raises:
            RefusedMessage: there is no such rank, or it has a link already; nothing has been changed.
        """

    def refuse(self, peer: Peer, refusal: RefusedMessage) -> None:
        """Handle a message on a peer's link that no rank of this run sends."""

    def greet(self, peer: Peer) -> None:
        """A link from a peer is open."""

    def target(
        self, context: int, source: Peer, message: Message, interrupt: Callable[[], None]
    ) -> Target | None:
        """Return the memory of a receive that waits for a message with this header; None without one.

        The payload is written there, and `deliver` or `release` follows.

        Args:
            context: context of the communicator.
            source: the sender.
            message: the message; its tensor shows the size and dtype of the payload.
            interrupt: function that makes the writing end early; called on any thread.
        """

    def release(self, target: Target) -> None:
        """The payload has broken off: the content of the memory is undefined."""

    def deliver(self, context: int, source: Peer, message: Message, target: Target | None = None) -> None:
        """Queue a received message for its communicator, or give it to the receive that has waited with `target`.

        Raises:
            MalformedMessage: the message cannot be queued; the queues are unchanged.
        """

    def lose(self, peer: Peer) -> None:
        """A peer's link to this rank is over: all that it sent has been delivered."""

    def lose_receiver(self, peer: Peer) -> None:
        """A peer takes nothing any more; it may have sent something before."""
