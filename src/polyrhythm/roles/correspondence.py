"""What the other ranks tell the leader: events, states and last reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_json, unpack_tensors
from polyrhythm.events import Event, from_json
from polyrhythm.roles.worker_state import WorkerState
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import State


class Correspondence:
    """The leader's side of the control messages.

    Args:
        world: where the leader is.
        pass_on: takes the others' events.

    Attributes:
        states: every worker's latest.
        reports: every server's last words, by its rank.
    """

    def __init__(self, world: World, pass_on: Callable[[Event], None]) -> None:
        self._world = world
        self._control = world.control()
        self._pass_on = pass_on
        self.states: dict[int, WorkerState] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self._server_states: dict[int, State] = {}

    def hand_out(self, workers: dict[int, WorkerState], servers: list[State]) -> None:
        """Sends every other rank the state that it resumes from."""
        for rank, server in zip(self._world.cast.servers, servers, strict=True):
            self._control.send(rank, Message(Kind.STATE, pack_tensors(*server)))
        for worker, state in workers.items():
            self._control.send(self._world.cast.workers[worker], state.message())

    def read(self) -> None:
        """Takes what has arrived."""
        while (found := self._control.poll()) is not None:
            self._take(*found)

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Takes what arrives until there is enough."""
        while not enough():
            self._take(*self._control.receive())

    def wait_for_step(self, step: int) -> None:
        """Waits until every worker has handed in its state of this step, or was stopped before it."""
        workers = range(len(self._world.cast.workers))
        self.read_until(
            lambda: all(
                worker in self.states
                and (self.states[worker].account.step >= step or self.states[worker].account.stopped)
                for worker in workers
            )
        )

    def wait_for_stop(self) -> None:
        """Waits until every worker has stopped early, or left because it was done."""
        workers = range(len(self._world.cast.workers))
        self.read_until(
            lambda: all(
                worker in self.states
                and (self.states[worker].account.stopped or self.states[worker].account.final)
                for worker in workers
            )
        )

    def wait_for_end(self) -> None:
        """Waits for everyone's last words."""
        cast = self._world.cast
        workers = range(len(cast.workers))
        self.read_until(
            lambda: (
                all(worker in self.states and self.states[worker].account.final for worker in workers)
                and len(self.reports) == len(cast.servers)
            )
        )

    def ask_servers(self) -> list[State]:
        """Asks every server for its part of a checkpoint."""
        servers = self._world.cast.servers
        self._server_states = {}
        for rank in servers:
            self._world.network.send(rank, Message(Kind.CHECKPOINT))
        self.read_until(lambda: len(self._server_states) == len(servers))
        return [self._server_states[rank] for rank in servers]

    def _take(self, source: int, message: Message) -> None:
        assert message.tensor is not None, "every control message carries a payload"
        if message.kind is Kind.EVENT:
            self._pass_on(from_json(unpack_json(message.tensor)))
        elif message.kind is Kind.REPORT:
            self.reports[source] = unpack_json(message.tensor)
        elif source in self._world.cast.servers:
            self._server_states[source] = unpack_tensors(message.tensor)
        else:
            state = WorkerState.from_message(message)
            self.states[state.account.worker] = state
