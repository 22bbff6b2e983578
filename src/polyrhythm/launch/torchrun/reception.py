"""Ranks of torchrun as a source of processes, in rank 0's process: it admits late ranks, and announces losses.

    guest ─────────────────── join server ─┐
    failed rank, restarted ── call ────────┼─▶ supervisor ─▶ a place; the list of failed ranks ─▶ the new process
    worker 0's events: lost, joined ───────┘            └──▶ notice of a loss ─▶ all others

`polyrhythm train` has a launcher that does this (`children.py`), and also starts replacements. Here only
torchrun starts processes. With its static rendezvous it restarts those of one host while the others continue:
such a process calls as at the start of a run (`gathering.py`), and gets its rank back once its last process
counts as lost. Threads of rank 0's process answer such calls (`Calls`):

call of rank r ─▶ r is known to be lost: the caller enters as the replacement
             └──▶ r has no pulse for the watchdog's limit: lost, not noticed by the others (it had no links yet)
             └──▶ r lives: the caller waits

`receiving` opens the reception for the duration of rank 0's loop.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import PREFIX, Rendezvous
from polyrhythm.events import (
    Event,
    RunEnded,
    ServerLost,
    WorkerLost,
)
from polyrhythm.launch.joining.connections import Address
from polyrhythm.launch.joining.join_server import Entrance, Inside, JoinServer
from polyrhythm.launch.process_source import Launcher
from polyrhythm.launch.supervisor import (
    Called,
    Fact,
    Lost,
    Missed,
    Order,
    Rules,
    Start,
    Supervisor,
)
from polyrhythm.launch.torchrun.gathering import (
    CALLS,
    Gathered,
    answer,
    answer_over,
    call_again,
    post_end,
    starts_hosts_apart,
)
from polyrhythm.launch.watchdog import read
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.role_assignment import RoleAssignment

_DONE = "done"


class Reception:
    """The ranks of torchrun as a source of processes, and the shell of their supervisor.

    Used by worker 0's loop, and by the threads of the join server and of calls.

    Args:
        rendezvous: rendezvous of worker 0.
        roles: ranks by role, with vacant places.
        started: the ranks that torchrun has started.
        emit: receiver of the run's events, one at a time.
        entrance: admission of joining workers; None: joining is disabled.

    Attributes:
        over: whether the run has ended well, so that no more ranks are needed.
        launcher: launcher of the run's supervisor.
    """

    look_every_s = inf
    waitables: tuple[()] = ()

    def __init__(
        self,
        rendezvous: Rendezvous,
        roles: RoleAssignment,
        started: Collection[int],
        emit: Callable[[Event], None],
        entrance: Entrance | None = None,
    ) -> None:
        self.over = False
        self._waiting: dict[int, Callable[[int], None]] = {}
        self.launcher = Launcher(
            Supervisor(roles, started, Rules(has_join_server=entrance is not None)),
            rendezvous.store.clone(),  # its loop may be waiting on the other
            self,
            emit,
            entrance,
        )

    def poll(self, ready: Sequence[Any] = ()) -> list[Fact]:
        """Return nothing: its facts are reported at once."""
        return []

    def carry_out(self, order: Order) -> None:
        """Let the process in that asks for its rank."""
        if isinstance(order, Start):
            self._waiting.pop(order.peer.rank)(order.peer.generation)

    def on_event(self, event: Event) -> None:
        """Forward an event of the run, and update the members from it."""
        if isinstance(event, RunEnded):
            self.over = event.outcome == _DONE
        self.launcher.on_event(event)
        if isinstance(event, WorkerLost | ServerLost):
            self.launcher.take(Lost(event.rank))

    def call(self, rank: int, admit: Callable[[int], None]) -> None:
        """Take the call of a process that torchrun has started again.

        Args:
            rank: rank that it had.
            admit: callback with the number of earlier processes of the rank, called as soon as it is free.
        """
        with self.launcher.turn:
            self._waiting[rank] = admit
            self.launcher.take(Called(rank))

    def miss(self, rank: int) -> None:
        """Declare a rank lost that another process asks for and that has not been missed yet."""
        self.launcher.take(Missed(rank))


_FOREVER = timedelta(days=365)
_CLOSING_PATIENCE_S = 5.0


class Calls:
    """Answers the calls of processes that torchrun has started again, on threads; a context manager.

    Args:
        outside: rendezvous of rank 0 as torchrun has it, where ranks call.
        start: start of the run that is in progress.
        reception: reception with the places.
        silence_s: seconds without a pulse after which a rank that is called for counts as failed.
        follows: whether another part of the run may follow; late callers are then admitted to that part.
    """

    def __init__(
        self,
        outside: Rendezvous,
        start: Gathered,
        reception: Reception,
        silence_s: float,
        *,
        follows: bool = False,
    ) -> None:
        self._store: Any = outside.store.clone()
        self._pulses: Any = start.rendezvous.store.clone()
        self._hearing: Any = outside.store.clone()  # a connection of its own, since it waits there
        self._hearing.set_timeout(_FOREVER)
        self._name = start.name
        self._reception = reception
        self._silence_s, self._follows = silence_s, follows
        self._unanswered: dict[str, int] = {}
        self._answered = set(start.answered)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="calls", daemon=True)

    def __enter__(self) -> Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        over = self._reception.over and not self._follows
        with suppress(RuntimeError, dist.DistError):  # the store is gone, and the caller with it
            if over:
                post_end(self._store)
            self._store.queue_push(CALLS, f"close 0 {self._name}".encode())
            self._thread.join(_CLOSING_PATIENCE_S)
            for nonce, rank in list(self._unanswered.items()):
                if over:
                    answer_over(self._store, nonce)
                else:  # for the next worker 0, or this one's next part
                    call_again(self._store, rank, nonce)

    def _receive(self) -> None:
        with suppress(RuntimeError, dist.DistError):
            while True:
                word, rank, about = self._hearing.queue_pop(CALLS, True).decode().split()
                if word == "close" and about == self._name:
                    return
                if word == "call" and about not in self._answered and about not in self._unanswered:
                    self._take(int(rank), about)

    def _take(self, rank: int, nonce: str) -> None:
        self._unanswered[nonce] = rank
        self._reception.call(rank, partial(self._answer, nonce))
        if nonce in self._unanswered:
            threading.Thread(target=self._doubt, args=(rank, nonce), name="doubt", daemon=True).start()

    def _answer(self, nonce: str, generation: int) -> None:
        self._unanswered.pop(nonce, None)
        self._answered.add(nonce)
        answer(self._store, nonce, self._name, generation)

    def _doubt(self, rank: int, nonce: str) -> None:
        """Watch whether the process that has a rank lives, for as long as another one calls for it."""
        with suppress(RuntimeError, dist.DistError):
            before = read(self._pulses, [rank]).get(rank)
            while not self._over.wait(self._silence_s) and nonce in self._unanswered:
                now = read(self._pulses, [rank]).get(rank)
                if now is None or (now == before and not now.left):
                    self._reception.miss(rank)
                before = now


@dataclass(frozen=True)
class Late:
    """Ways for others to join late.

    Attributes:
        entrance: entrance for guests; None: guests are not admitted.
        silence_s: silence in seconds for which a rank may be silent.
        follows: whether another part of the run may follow, in which they then take part.
    """

    entrance: Entrance | None
    silence_s: float
    follows: bool = False


@contextmanager
def receiving(
    outside: Rendezvous,
    start: Gathered,
    roles: RoleAssignment,
    emit: Callable[[Event], None],
    late: Late,
) -> Iterator[Callable[[Event], None]]:
    """Admit late ranks; yield a function that takes the run's events instead of `emit`, from any thread.

    Args:
        outside: rendezvous of this rank as torchrun has it, where failed ranks call.
        start: start of the run, as this rank knows it.
        roles: ranks by role.
        emit: receiver of events, one at a time.
        late: ways for others to join late.
    """
    if start.rendezvous.rank != LEADER:
        yield emit
        return
    reception = Reception(start.rendezvous, roles, range(outside.size), emit, late.entrance)
    reception.launcher.open(Inside(_store_address(), roles, f"{PREFIX}/{start.name}"))
    with ExitStack() as stack:
        if starts_hosts_apart(outside):
            stack.enter_context(Calls(outside, start, reception, late.silence_s, follows=late.follows))
        if reception.launcher.join_server is not None:
            stack.enter_context(_listening(reception.launcher, reception.launcher.join_server))
        yield reception.on_event


@contextmanager
def _listening(launcher: Launcher, join_server: JoinServer) -> Iterator[None]:
    """Hear the join server on a thread; at the end give guests a moment to leave."""
    bell, ringing = socket.socketpair()

    def listen() -> None:
        while bell.fileno() not in wait([join_server.fileno(), bell.fileno()]):
            launcher.look()

    thread = threading.Thread(target=listen, name="reception", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        _end(thread, ringing)
        raise
    else:
        _end(thread, ringing)
        launcher.see_off()
    finally:
        bell.close()
        ringing.close()


def _end(thread: threading.Thread, ringing: socket.socket) -> None:
    ringing.send(b"!")
    thread.join()


def _store_address() -> Address:
    return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
