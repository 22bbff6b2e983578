"""What has arrived at a rank and waits to be received, by context, sender and tag."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from polyrhythm.communication.message import Message


@dataclass(frozen=True, slots=True)
class Want:
    """What a receiver waits for.

    Attributes:
        context: the communicator that it receives on.
        source: global rank of the sender, or None for anyone in `members`.
        tag: the message's tag.
        members: global ranks of the communicator.
    """

    context: int
    source: int | None
    tag: int
    members: tuple[int, ...]


class Inbox:
    """Messages in the order of their arrival. Knows nothing of threads or time: its owner locks or switches."""

    def __init__(self) -> None:
        self._arrived: dict[tuple[int, int], deque[tuple[int, Message]]] = {}
        self._lost: dict[int, set[int]] = {}

    def put(self, context: int, source: int, message: Message) -> None:
        """Adds a message from global rank `source`."""
        self._arrived.setdefault((context, message.tag), deque()).append((source, message))

    def take(self, want: Want) -> tuple[int, Message] | None:
        """Takes the oldest message that is wanted, if there is one."""
        queue = self._arrived.get((want.context, want.tag))
        if not queue:
            return None
        for position, (source, message) in enumerate(queue):
            if want.source is None or source == want.source:
                del queue[position]
                if not queue:  # tags of collectives never come again
                    del self._arrived[want.context, want.tag]
                return source, message
        return None

    def lose(self, rank: int) -> None:
        """Notes that a global rank is gone."""
        self._lost.setdefault(rank, set())

    def is_lost(self, rank: int) -> bool:
        """Tells whether a global rank is known to be gone."""
        return rank in self._lost

    def news_of_loss(self, want: Want) -> int | None:
        """Gives a lost rank that this receiver must hear of: its own source always, any other member once."""
        for rank, told in self._lost.items():
            if want.source == rank:
                return rank
            if want.source is None and rank in want.members and want.context not in told:
                told.add(want.context)
                return rank
        return None
