"""The reception of a run under torchrun, in worker 0's process: admits late comers, and tells of losses.

    guest ─────────────────── join server ─┐
    lost rank, started again ─ call ───────┼─▶ a place; the list of who is gone ─▶ the newcomer
    leader's events: lost, joined ─────────┘─▶ notice of a loss ─▶ all others

`polyrhythm train` has a launcher that does this (`children/supervisor.py`), and starts successors besides.
Here only torchrun starts processes. With its static rendezvous it starts those of one host again while the
others go on: such a process calls as at the start of a run (`gathering.py`), and gets its rank back once its
last process counts as lost. Threads of worker 0's process answer such calls (`Calls`):

call of rank r ─▶ r is known to be lost: it comes in as the successor
             └──▶ r shows no pulse for as long as the watchdog bears: lost, unknown to all (it had no links yet)
             └──▶ r lives: the caller waits

`receiving` opens the reception for as long as worker 0's loop goes on.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    Rendezvous,
    tell_of_loss,
    tell_of_start,
)
from polyrhythm.events import (
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerJoined,
    ServerLost,
    WorkerJoined,
    WorkerLost,
)
from polyrhythm.launch.joining.connections import Address
from polyrhythm.launch.joining.join_server import Entrance, Guests, Inside, Places
from polyrhythm.launch.succession import Absences
from polyrhythm.launch.torchrun.gathering import (
    CALLS,
    Gathered,
    answer,
    answer_over,
    call_again,
    say_that_it_is_over,
    starts_hosts_apart,
)
from polyrhythm.launch.watchdog import read
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.role_assignment import RoleAssignment

_DONE = "done"


class Reception:
    """Worker 0's list of who is there; used by its loop, and by the threads of the door and of calls.

    Args:
        rendezvous: of worker 0.
        cast: who does what, with the places that nobody has yet.
        started: the ranks that torchrun has started.
        emit: takes the run's events, one at a time.

    Attributes:
        guests: who came through the door, where there is one.
        places: of workers, that may be taken.
        over: whether the run has ended well, so that nobody need come any more.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        cast: RoleAssignment,
        started: Collection[int],
        emit: Callable[[Event], None],
    ) -> None:
        self.guests: Guests | None = None
        self.places = Places()
        self.over = False
        self._places_of_servers = Places()
        self._store = rendezvous.store.clone()  # its loop may be waiting on the other
        self._cast = cast
        self._emit = emit
        self._started = frozenset(started)
        self._turn = threading.RLock()
        self._absences = Absences(cast)
        self._newest = {rank: Peer(rank, 0) for rank in started}
        self._take_part: set[int] = set()
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._how_to_join = ""
        self._time_s = 0.0
        for rank in cast.workers:
            if rank not in started:
                self.places.vacate(Peer(rank, 0))
                self._tell_all(Peer(rank, 0))

    def open(self, entrance: Entrance) -> Guests:
        """Gives the list of guests, who come in by an entrance from now on."""
        self._how_to_join = entrance.how
        self.guests = Guests(
            entrance.open(self.places), self._name, self._say, tell_of_loss=self._gone, welcome=self._welcome
        )
        return self.guests

    def look(self) -> None:
        """Takes the door's news."""
        with self._turn:
            if self.guests is not None:
                self.guests.look()

    def on_event(self, event: Event) -> None:
        """Passes an event of the run on, and learns from it who is there."""
        with self._turn:
            self._time_s = event.time_s
            if isinstance(event, RunEnded):
                self.over = event.outcome == _DONE
                if self.guests is not None:
                    self.guests.sum_up()
            self._emit(event)
            if isinstance(event, RunStarted):
                self._begin(event.parameters)
            elif isinstance(event, WorkerJoined | ServerJoined):
                self._absences.fill(event.rank)
                self._take_part.add(event.rank)
            elif isinstance(event, WorkerLost | ServerLost):
                self._lose(event.rank)

    def call(self, rank: int, let_in: Callable[[int], None]) -> None:
        """A process that torchrun has started again asks for its rank.

        Args:
            rank: that it had.
            let_in: told how many have had the rank before, as soon as it is free.
        """
        with self._turn:
            if rank not in self._newest:
                return
            self._waiting[rank] = let_in
            self._let_in(rank)
            is_known = not self._take_part or rank in self._take_part or self._is_guests(rank)
            if rank in self._waiting and not is_known:
                # which has died before it took part: torchrun has one at a time
                self._gone(self._newest[rank])

    def miss(self, rank: int) -> None:
        """A rank is gone that somebody waits for, and nobody has noticed."""
        with self._turn:
            if rank in self._waiting and not self._is_guests(rank):
                self._gone(self._newest[rank])

    def _begin(self, parameters: int) -> None:
        self._take_part |= self._started
        if self.guests is not None:
            self.guests.door.begin(parameters)
            self._say(self._how_to_join)

    def _lose(self, rank: int) -> None:
        if rank not in self._take_part or self._is_guests(rank):  # a guest is seen to go by the door
            return
        lost = self._newest[rank]
        self._gone(lost)
        if self.guests is not None and rank in self._cast.workers and self._newest[rank] == lost:
            self._say(f"the place of {self._name(rank)} is vacant for who joins")

    def _gone(self, lost: Peer) -> None:
        """Tells all others that a process is gone; whoever waits for its rank may have it."""
        self._take_part.discard(lost.rank)
        self._tell_all(lost)
        self._places(lost.rank).vacate(lost)
        self._let_in(lost.rank)

    def _let_in(self, rank: int) -> None:
        if rank not in self._waiting:
            return
        peer = self._places(rank).take(rank)
        if peer is not None:
            tell_of_start(self._store, peer)  # for guests that come at the same time
            self._welcome(peer)
            self._waiting.pop(rank)(peer.incarnation)

    def _welcome(self, newcomer: Peer) -> None:
        """Tells a newcomer of those whom it would look for in vain."""
        self._newest[newcomer.rank] = newcomer
        if newcomer.rank in self._cast.workers:  # a server counts once it has its shards
            self._absences.fill(newcomer.rank)
        for lost in self._absences.news_for(newcomer):
            tell_of_loss(self._store, lost, newcomer)

    def _tell_all(self, lost: Peer) -> None:
        self._absences.lose(lost)
        for other in self._newest.values():
            if other.rank != lost.rank:
                tell_of_loss(self._store, lost, other)

    def _places(self, rank: int) -> Places:
        return self.places if rank in self._cast.workers else self._places_of_servers

    def _is_guests(self, rank: int) -> bool:
        return self.guests is not None and any(guest.rank == rank for guest in self.guests.present)

    def _name(self, rank: int) -> str:
        workers = self._cast.workers
        what = (
            f"worker {workers.index(rank)}" if rank in workers else f"server {self._cast.servers.index(rank)}"
        )
        return f"{what} (rank {rank})"

    def _say(self, text: str) -> None:
        self._emit(Notice(time_s=self._time_s, text=text))


_FOREVER = timedelta(days=365)
_CLOSING_PATIENCE_S = 5.0


class Calls:
    """Answers them; a context.

    Args:
        outside: of worker 0, as torchrun has it: where ranks call.
        start: of the run that is under way.
        reception: has places.
        silence_s: without a pulse, after which a rank that is called for is gone.
    """

    def __init__(self, outside: Rendezvous, start: Gathered, reception: Reception, silence_s: float) -> None:
        self._store: Any = outside.store.clone()
        self._pulses: Any = start.rendezvous.store.clone()
        self._hearing: Any = outside.store.clone()  # a connection of its own, since it waits there
        self._hearing.set_timeout(_FOREVER)
        self._name = start.name
        self._reception = reception
        self._silence_s = silence_s
        self._unanswered: dict[str, int] = {}
        self._answered = set(start.answered)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="calls", daemon=True)

    def __enter__(self) -> Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(RuntimeError, dist.DistError):  # the store is gone, and with it whoever calls
            if self._reception.over:
                say_that_it_is_over(self._store)
            self._store.queue_push(CALLS, f"close 0 {self._name}".encode())
            self._thread.join(_CLOSING_PATIENCE_S)
            for nonce, rank in list(self._unanswered.items()):
                if self._reception.over:
                    answer_over(self._store, nonce)
                else:  # for the next worker 0
                    call_again(self._store, rank, nonce)

    def _hear(self) -> None:
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

    def _answer(self, nonce: str, incarnation: int) -> None:
        self._unanswered.pop(nonce, None)
        self._answered.add(nonce)
        answer(self._store, nonce, self._name, incarnation)

    def _doubt(self, rank: int, nonce: str) -> None:
        """Sees whether the process that is said to have a rank lives, for as long as somebody else calls for it."""
        with suppress(RuntimeError, dist.DistError):
            before = read(self._pulses, [rank]).get(rank)
            while not self._over.wait(self._silence_s) and nonce in self._unanswered:
                now = read(self._pulses, [rank]).get(rank)
                if now is None or (now == before and not now.left):
                    self._reception.miss(rank)
                before = now


@dataclass(frozen=True)
class Late:
    """How others come late.

    Attributes:
        entrance: for guests; None: they do not.
        silence_s: for which a rank may be silent.
    """

    entrance: Entrance | None
    silence_s: float


@contextmanager
def receiving(
    outside: Rendezvous,
    start: Gathered,
    cast: RoleAssignment,
    emit: Callable[[Event], None],
    late: Late,
) -> Iterator[Callable[[Event], None]]:
    """Lets late comers in; gives what takes the run's events instead of `emit`, from any thread.

    Args:
        outside: of this rank, as torchrun has it: where lost ranks call.
        start: of the run, as this rank knows it.
        cast: who does what.
        emit: takes events, one at a time.
        late: how others come late.
    """
    if start.rendezvous.rank != LEADER:
        yield emit
        return
    reception = Reception(start.rendezvous, cast, range(outside.size), emit)
    with ExitStack() as stack:
        if starts_hosts_apart(outside):
            stack.enter_context(Calls(outside, start, reception, late.silence_s))
        if late.entrance is not None:
            guests = reception.open(late.entrance)
            guests.door.open(Inside(_store_address(), cast, start.prefix))
            stack.enter_context(_listening(reception, guests))
        yield reception.on_event


@contextmanager
def _listening(reception: Reception, guests: Guests) -> Iterator[None]:
    """Hears the door on a thread; at the end gives guests a moment to leave."""
    bell, ringing = socket.socketpair()

    def listen() -> None:
        while bell.fileno() not in select.select([guests.door.fileno(), bell.fileno()], [], [])[0]:
            reception.look()

    thread = threading.Thread(target=listen, name="reception", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        _end(thread, ringing)
        raise
    else:
        _end(thread, ringing)
        guests.see_off(wait)
    finally:
        bell.close()
        ringing.close()


def _end(thread: threading.Thread, ringing: socket.socket) -> None:
    ringing.send(b"!")
    thread.join()


def _store_address() -> Address:
    return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
