"""Replies that are leaving, while a server goes on receiving."""

from __future__ import annotations

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Message
from polyrhythm.errors import PeerLost
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy


class Outbox:
    """Sends one server's replies in the background.

    A reply's tensor never changes afterwards (see `ServerPart`), so nobody waits until it has left. Whoever is
    answered again has had the answer before, so at most one reply a rank is kept. A reply to a rank that is lost, and
    can be done without, is dropped.

    Args:
        strategy: says who can be done without.
        world: where the server is.
    """

    def __init__(self, strategy: Strategy, world: World) -> None:
        self._strategy = strategy
        self._world = world
        self._start_send = world.network.start_send
        self._leaving: dict[int, Handle] = {}

    def send(self, replies: list[tuple[int, Message]]) -> None:
        """Starts to send."""
        leaving, start_send = self._leaving, self._start_send
        for to, reply in replies:
            before = leaving.pop(to, None)
            if before is not None:
                self._wait(to, before)
            try:
                leaving[to] = start_send(to, reply)
            except PeerLost:
                if not self._world.goes_on_without(to, self._strategy):
                    raise

    def flush(self) -> None:
        """Waits until everything has left."""
        for to, handle in self._leaving.items():
            self._wait(to, handle)
        self._leaving.clear()

    def _wait(self, to: int, handle: Handle) -> None:
        try:
            handle.wait()
        except PeerLost:
            if not self._world.goes_on_without(to, self._strategy):
                raise
