"""Sources of a run's processes, and the shell that connects a source to the supervisor.

A source reports facts about its processes and executes orders about them:

    child processes            children.py                   polled
    ranks of a user's script   script.py                     polled
    ranks of torchrun          torchrun/reception.py         reports facts at once, on several threads
    workers that join by hand  joining/join_server.py        polled, next to any of the others

The shell (`Launcher`) waits until a source reports, passes the facts to the supervisor (`supervisor.py`,
which is pure), and executes its orders, some of them by the store where the ranks meet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from multiprocessing.connection import wait
from typing import Any, Protocol

from polyrhythm.communication.transports.torch_distributed.rendezvous import record_loss, record_start
from polyrhythm.events import Event, Notice, RunEnded, RunStarted, ServerJoined, WorkerJoined
from polyrhythm.launch.joining.join_server import Entrance, Inside
from polyrhythm.launch.supervisor import (
    Announce,
    Began,
    End,
    Ended,
    Fact,
    Joined,
    Order,
    PrintMessage,
    Quiet,
    Start,
    Stop,
    StopAsked,
    Supervisor,
)
from polyrhythm.roles.world import LEADER, StopRequest

FAREWELL_S = 5.0
"""Seconds for guests to leave once all other ranks have left, and before the store is closed."""


class ProcessSource(Protocol):
    """A source of processes.

    `look_every_s`: seconds after which it must be polled even if nothing is readable.
    """

    look_every_s: float

    @property
    def waitables(self) -> Sequence[Any]:
        """Objects that become readable when a fact is pending."""

    def poll(self, ready: Sequence[Any]) -> list[Fact]:
        """Return the facts since the last call, without waiting; `ready` has the readable streams."""

    def carry_out(self, order: Order) -> None:
        """Carry out an order, if it concerns this source."""


class Launcher:
    """Passes facts to a supervisor and its orders to the sources.

    Args:
        supervisor: supervisor of the run.
        store: store where the ranks meet.
        source: source of its processes.
        emit: receiver of the events of the run, and messages for users.
        entrance: admission of joining workers; None: joining is disabled.
        stop: returns whether a stop was requested.

    Attributes:
        supervisor: the argument of that name.
        join_server: second source of processes; None: joining is disabled.
        error: error of the run, once it has ended.
        turn: held while a fact is taken; for what must be done together with it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        store: Any,
        source: ProcessSource,
        emit: Callable[[Event], None],
        entrance: Entrance | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.supervisor = supervisor
        self.join_server = None if entrance is None else entrance.open()
        self.error: Exception | None = None
        self._how_to_join = "" if entrance is None else entrance.how
        self._store = store
        self._sources: list[ProcessSource] = (
            [source] if self.join_server is None else [self.join_server, source]
        )
        self._emit = emit
        self._stop = stop or StopRequest()
        self.turn = threading.RLock()
        self._time_s = 0.0
        self._over = False
        self._stop_sent = False

    def open(self, inside: Inside | None = None) -> None:
        """Announce the vacant places, and admit guests, which receive `inside`."""
        with self.turn:
            self._carry_out(self.supervisor.open())
        if self.join_server is not None and inside is not None:
            self.join_server.open(inside)

    def take(self, fact: Fact) -> None:
        """Pass a fact on; called by any thread."""
        with self.turn:
            self._carry_out(self.supervisor.on(fact, time.monotonic()))

    def look(self) -> None:
        """Read the join server's facts."""
        if self.join_server is not None:
            with self.turn:
                self._poll([self.join_server], ())

    def on_event(self, event: Event, rank: int = LEADER) -> None:
        """Forward an event of the run, and pass its consequences to the supervisor; called by any thread."""
        with self.turn:
            if isinstance(event, Notice) and rank != LEADER:  # its clock began with training
                event = replace(event, time_s=self._time_s)
            self._time_s = event.time_s
            if isinstance(event, WorkerJoined | ServerJoined):
                self.take(Joined(event.rank))
            if isinstance(event, RunEnded):
                self.look()  # the last word counts all refusals
                self.take(Ended(event.outcome))
                if self.supervisor.failure is not None:
                    return  # the run has failed, as is reported when all have left: rank 0 was stopped
            self._emit(event)
            if isinstance(event, RunStarted):
                self.take(Began())
                if self.join_server is not None:
                    self.join_server.begin(event.parameters)
                    self._print_line(self._how_to_join)

    def run(self, look: Callable[[], None] = lambda: None, look_every_s: float = inf) -> None:
        """Return when the run has ended; the result is then in `error`.

        Args:
            look: called after every message or timeout; an exception in it ends the run.
            look_every_s: the longest patience.
        """
        while not self._over:
            ready = wait(list(self._waitables()), self._patience_s(look_every_s))
            look()
            if self._stop.requested and not self._stop_sent:
                self._stop_sent = True
                self.take(StopAsked())
            found = self._poll(self._sources, ready)
            if not ready and not found and not self._over:
                self.take(Quiet())

    def see_off(self) -> None:
        """Give guests a moment to leave, once the run is over."""
        if self.join_server is None:
            return
        self.join_server.end()
        deadline = time.monotonic() + FAREWELL_S
        self.look()
        while self.supervisor.guests and (left_s := deadline - time.monotonic()) > 0:
            wait([self.join_server.fileno()], left_s)
            self.look()

    def _print_line(self, text: str) -> None:
        self._emit(Notice(time_s=self._time_s, text=text))

    def _poll(self, sources: Sequence[ProcessSource], ready: Sequence[Any]) -> bool:
        found = False
        for source in sources:
            for fact in source.poll(ready):
                found = True
                self.take(fact)
        return found

    def _waitables(self) -> Iterator[Any]:
        for source in self._sources:
            yield from source.waitables

    def _patience_s(self, look_every_s: float) -> float | None:
        until = self.supervisor.next_s
        left_s = inf if until is None else max(0.0, until - time.monotonic())
        patience_s = min(left_s, look_every_s, *(source.look_every_s for source in self._sources))
        return None if patience_s == inf else patience_s

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Announce(lost=lost, to=to):
                    record_loss(self._store, lost, to)
                case Start(peer=peer) if peer.generation:
                    # First of all: a guest that joins at this moment must receive it, or be received.
                    record_start(self._store, peer)
                case PrintMessage(text=text):
                    self._print_line(text)
                case Stop():
                    self._stop.request()
                case End(error=error):
                    self._over, self.error = True, error
                case _:
                    pass
            for source in self._sources:
                source.carry_out(order)
