"""Messages that a server does nothing with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json
from polyrhythm.events import Notice
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.world import World


class Refusals:
    """Counts what is refused, and tells the run's log of the first from each rank for each reason.

    Args:
        index: of the server.
        world: where it is.
        channel: to the leader.

    Attributes:
        counted: refused messages, by reason.
    """

    def __init__(self, index: int, world: World, channel: LeaderChannel) -> None:
        self.counted: Counter[str] = Counter()
        self._index = index
        self._clock = world.clock
        self._channel = channel
        self._told: set[tuple[int, Reason]] = set()
        self._started_at = self._clock.now()

    @contextmanager
    def of(self, source: int) -> Iterator[None]:
        """Bears the refusal of a message from this rank."""
        try:
            yield
        except RefusedMessage as refusal:
            self.note(source, refusal)

    def note(self, source: int, refusal: RefusedMessage) -> None:
        """Counts a refusal, and tells the first of its kind."""
        self.counted[refusal.reason.value] += 1
        if (source, refusal.reason) in self._told:
            return
        self._told.add((source, refusal.reason))
        text = f"server {self._index} refused a message from rank {source} ({refusal.reason}): {refusal}"
        notice = Notice(time_s=self._clock.now() - self._started_at, text=text)
        self._channel.send(Message(Kind.EVENT, pack_json(notice.to_json())))
