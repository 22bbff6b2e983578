"""Who is there: the processes of a run, and what a rank's links of any kind ask and tell about them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from polyrhythm.communication.message import Message, RefusedMessage


class Peer(NamedTuple):
    """A process of a run: the rank whose number it has, and how many have had it before."""

    rank: int
    generation: int


class Membership(Protocol):
    """What a rank knows of the others, as its links ask and tell it; called by many threads.

    Attributes:
        most_bytes: that the payload of a message may have in this run.
        patience_s: how long there may be no way to another host before its ranks count as lost.
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
        """A link that is said to be a peer's brought something that no rank of this run sends."""

    def greet(self, peer: Peer) -> None:
        """A link from a peer is open."""

    def deliver(self, context: int, source: Peer, message: Message) -> None:
        """A message has come.

        Raises:
            MalformedMessage: it cannot be kept; nothing has been changed.
        """

    def lose(self, peer: Peer) -> None:
        """A peer's link to this rank is over: all that it sent has been delivered."""

    def lose_receiver(self, peer: Peer) -> None:
        """A peer takes nothing any more; it may have sent something before."""
