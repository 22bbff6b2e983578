"""A root: a server whose pushers are leaves, who can tell its answers to their pushes from those to their pulls."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.serving.shard_server import ShardServer
from polyrhythm.strategies.strategy import State

Reply = tuple[int, Message]


class RootServer:
    """One server; see `ServerPart`.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: ShardServer) -> None:
        self._inner = inner

    @property
    def staleness(self) -> Counter[int]:
        """How many leaves' means were applied at which staleness."""
        return self._inner.staleness

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._inner.version

    @property
    def steps(self) -> dict[int, int]:
        """How many means of each leaf it holds."""
        return self._inner.steps

    @property
    def done(self) -> bool:
        """Whether all leaves have left, and the first has let the roots go."""
        return self._inner.done

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a leaf; what a push sets free goes out as `VECTOR`."""
        replies = self._inner.on_message(source, message)
        if message.kind is not Kind.PUSH:
            return replies
        return [(to, reply._replace(kind=Kind.VECTOR)) for to, reply in replies]

    def on_loss(self, rank: int) -> list[Reply]:
        """No leaf can be done without."""
        return self._inner.on_loss(rank)

    def state(self) -> State:
        """Gives all that a resumed root needs, parameters included."""
        return self._inner.state()

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        self._inner.load_state(state)
