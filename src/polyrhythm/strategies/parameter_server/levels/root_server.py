"""A root: a server whose pushers are leaves, who can tell its answers to their pushes from those to their pulls."""

from __future__ import annotations

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.serving.shard_server import Reply, ShardServer


class RootServer(ShardServer):
    """One server; see `ShardServer`. What a push sets free goes out as `VECTOR`."""

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a leaf and gives the replies.

        Raises:
            RefusedMessage: a message that no leaf sends.
        """
        replies = super().on_message(source, message)
        if message.kind is not Kind.PUSH:
            return replies
        return [(to, reply._replace(kind=Kind.VECTOR)) for to, reply in replies]
