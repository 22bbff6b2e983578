"""What a rank knows of the others, where a test plays all of them."""

from __future__ import annotations

import queue
from collections.abc import Callable

from polyrhythm.communication.message import UNBOUNDED_BYTES, Message, Reason, RefusedMessage
from polyrhythm.communication.transports.inbox import Target
from polyrhythm.communication.transports.membership import Peer

PATIENCE_S = 20.0


class Heard:
    """A membership that only notes."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[tuple[int, Peer, Message]] = queue.SimpleQueue()
        self.greeted: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self.deaf: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[tuple[Peer, Reason]] = queue.SimpleQueue()
        self.gone: set[int] = set()
        self.most_bytes = UNBOUNDED_BYTES
        self.patience_s = PATIENCE_S

    def generation(self, rank: int) -> int:
        return 1

    def is_lost(self, rank: int) -> bool:
        return rank in self.gone

    def admit(self, peer: Peer) -> None:
        if peer.rank < 0:
            raise RefusedMessage(Reason.SENDER, "nobody")

    def refuse(self, peer: Peer, refusal: RefusedMessage) -> None:
        self.refused.put((peer, refusal.reason))

    def greet(self, peer: Peer) -> None:
        self.greeted.put(peer)

    def target(
        self, context: int, source: Peer, message: Message, interrupt: Callable[[], None]
    ) -> Target | None:
        return None

    def deliver(self, context: int, source: Peer, message: Message, target: Target | None = None) -> None:
        self.messages.put((context, source, message))

    def lose(self, peer: Peer) -> None:
        self.lost.put(peer)

    def lose_receiver(self, peer: Peer) -> None:
        self.deaf.put(peer)

    def next(self) -> Message:
        return self.messages.get(timeout=PATIENCE_S)[2]
