"""How a lost server's successor comes in."""

from __future__ import annotations

from polyrhythm.communication.message import Kind, Message
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.serving.outbox import Outbox
from polyrhythm.roles.world import World
from polyrhythm.strategies.server_part import KeepingPart, ServerPart


class Entry:
    """One server's: a successor asks others for its shards, and tells the leader that it has them.

    Args:
        part: of the server.
        world: where it is.
        outbox: takes its questions.

    Attributes:
        due: whether that has still to be told.
    """

    def __init__(self, part: ServerPart, world: World, outbox: Outbox) -> None:
        self.due = False
        if world.rejoins and isinstance(part, KeepingPart):
            self.due = True
            self._part = part
            self._incarnation = world.incarnation
            outbox.send(part.rejoin(world.incarnation))

    def tell(self, channel: LeaderChannel) -> None:
        """Tells the leader, once this server has all of its shards."""
        if self._part.whole:
            self.due = False
            channel.send(Message(Kind.JOIN, version=self._incarnation))
