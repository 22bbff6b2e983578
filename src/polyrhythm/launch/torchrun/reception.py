"""The reception of a run that torchrun has started, in worker 0's process: lets late comers in, and tells of losses.

    guest ─────────────────── door ──┐
    lost rank, started again ─ call ─┼─▶ a place; words of who is gone ─▶ the newcomer
    leader's events: lost, joined ───┘─▶ words of a loss ─▶ all others

`polyrhythm train` has a launcher that does this (`watch.py`), and starts successors besides. Here only torchrun starts
processes. With its static rendezvous it starts those of one host again while the others go on: such a process calls as
at the start of a run (`gathering.py`), and gets its rank back once whoever had it counts as lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.link_words import tell_of_loss, tell_of_start
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
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
from polyrhythm.launch.absences import Absences
from polyrhythm.launch.joining.entrance import Entrance
from polyrhythm.launch.joining.guests import Guests
from polyrhythm.launch.joining.places import Places
from polyrhythm.strategies.cast import Cast

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
        self, rendezvous: Rendezvous, cast: Cast, started: Collection[int], emit: Callable[[Event], None]
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
