"""The servers' side of a saved optimiser, in a loop of one's own: who leads asks for it, and gives it back."""

from __future__ import annotations

from typing import Any

from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_tensors
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy


class ServerStates:
    """The leader's way to them.

    Args:
        world: where the leader is.
        strategy: says which server has what.
    """

    def __init__(self, world: World, strategy: Strategy) -> None:
        self._world = world
        self._strategy = strategy
        self._control = world.control()

    def ask(self) -> list[dict[str, Any]]:
        """Asks every server for the state of its shard: tensors by name, and facts."""
        servers = self._world.cast.servers
        for shard, rank in enumerate(servers):
            self._world.network.send(rank, Message(Kind.CHECKPOINT, step=shard))
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(servers):
            _, message = self._control.receive()
            if (
                message.kind is Kind.STATE and message.tensor is not None
            ):  # else a report that nobody reads here
                tensors, facts = unpack_tensors(message.tensor)
                found[message.step] = {"tensors": tensors, "facts": facts}
        return [found[shard] for shard in range(len(servers))]

    def give(self, states: list[dict[str, Any]]) -> None:
        """Gives every server the states of the shards that it holds; before training begins."""
        for server, rank in enumerate(self._world.cast.servers):
            for shard in self._strategy.holds(server):
                packed = pack_tensors(states[shard]["tensors"], states[shard]["facts"])
                self._world.network.send(rank, Message(Kind.STATE, packed, step=shard))
