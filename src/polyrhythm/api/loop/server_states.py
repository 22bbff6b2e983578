"""The servers' side of a saved optimiser, in a loop of one's own: who leads asks for it, and gives it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyrhythm.communication.message import Kind, Message, pack_tensors
from polyrhythm.roles.world import World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


class ServerStates:
    """The leader's way to them.

    Args:
        world: where the leader is.
        strategy: says which server has what.
        ask: asks for the state of every shard.
    """

    def __init__(self, world: World, strategy: Strategy, ask: Callable[[], list[State]]) -> None:
        self._world = world
        self._strategy = strategy
        self._ask = ask

    def ask(self) -> list[dict[str, Any]]:
        """Asks for the state of every shard: tensors by name, and facts."""
        return [{"tensors": tensors, "facts": facts} for tensors, facts in self._ask()]

    def give(self, states: list[dict[str, Any]]) -> None:
        """Gives every server the states of the shards that it holds; before training begins."""
        for server, rank in enumerate(self._world.cast.servers):
            for shard in self._strategy.holds(server):
                packed = pack_tensors(states[shard]["tensors"], states[shard]["facts"])
                self._world.network.send(rank, Message(Kind.STATE, packed, step=shard))
