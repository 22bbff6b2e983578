"""How a run gets over the loss of a rank: word to the others, and a successor after a pause.

a rank dies that can be spared ─▶ word to the others ─▶ they go on ─▶ pause ─▶ a successor, under the same rank
                                                └─▶ no restart left: a worker's place is vacant, for who joins by hand
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.link_words import tell_of_loss, tell_of_start
from polyrhythm.errors import RunError
from polyrhythm.launch.absences import Absences
from polyrhythm.launch.children.child import PEER
from polyrhythm.launch.children.ranks import Child, Ranks
from polyrhythm.launch.joining.guests import Guests
from polyrhythm.launch.signals import held_back
from polyrhythm.launch.succession import Succession
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import LEADER, StopRequest, goes_on_without


class Recovery:
    """Handles the losses of a run's processes for its launcher.

    Args:
        ranks: the processes of the run.
        stop: whether someone wants the run to stop.
        ledger: of the run so far, which its keeper goes on with.
        say: tells people.

    Attributes:
        guests: those who joined by hand, once they can.
        absences: who is gone.
        succession: who is to be started again.
        ended: whether the leader has said its last word.
        too_few: the error of a run that was made to stop since too few workers are left.
    """

    def __init__(self, ranks: Ranks, stop: StopRequest, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.guests: Guests | None = None
        self.absences = Absences(ranks.cast)
        self.succession = Succession(ranks.job.losses.restarts)
        self.ended = False
        self.too_few: RunError | None = None
        self._ranks = ranks
        self._job = ranks.job
        self._cast = ranks.cast
        self._stop = stop
        self._ledger = ledger
        self._say = say

    def start_successors(self, store: Any) -> None:
        """Starts who is due.

        Args:
            store: where the ranks meet.
        """
        for peer in self.succession.take_due(time.monotonic()):
            # A guest that has not heard of this one must be heard of by it, and the reverse.
            tell_of_start(store, peer)
            if self.guests is not None:
                self.guests.look()
            guests = () if self.guests is None else self.guests.present
            with held_back():  # by the child, until it knows what to do then
                self._ranks.start(peer, guests, self._ledger if peer.rank == LEADER else None)
            self.welcome(peer, store)
            if self._stop.requested:
                self._ranks.signal(signal.SIGTERM)

    def handle_loss(self, child: Child, store: Any) -> None:
        """Tells the others of a loss, and people; the successor is due after a pause, if there is one.

        Args:
            child: who is lost.
            store: where the ranks meet.
        """
        self.tell_of_loss(child.peer, store)
        awaited = child.rank == LEADER and self._job.strategy.regroups(self._job.workers)
        pause_s = None
        if not self._stop.requested:
            pause_s = self.succession.lose(child.peer, time.monotonic(), awaited=awaited)
        used = f"{self._job.losses.restarts - self.succession.left} of {self._job.losses.restarts}"
        when = f"in {pause_s:g} s" if pause_s else "at once"
        then = "" if pause_s is None else f", and it is started again {when} (restart {used})"
        if child.rank in self._cast.servers:
            held = "who has its shards as well goes on with them"
            self._say(f"{self._ranks.name(child.rank)} {child.death}; {held}{then}")
            return
        if pause_s is None and self.guests is not None:
            self.guests.door.vacate(child.peer)
            then = ", and its place is vacant for who joins"
        others = "the others wait for its successor" if awaited else "the others go on"
        self._say(f"{self._ranks.name(child.rank)} {child.death}; {others}{then}")
        if pause_s is None and self._left < self._job.losses.min_workers:
            # The leader may not know of all that died.
            self._end_for_want_of_workers()

    @property
    def _left(self) -> int:
        """How many workers are there, or have done all that was theirs."""
        workers = [child for child in self._ranks.children if child.rank in self._cast.workers]
        guests = 0 if self.guests is None else len(self.guests.present)
        return sum(child.open or not child.failed for child in workers) + guests

    def _end_for_want_of_workers(self) -> None:
        if self.too_few is not None or not self._stop.requested:  # else people have asked for it
            self.too_few = self._job.too_few(self._left)
        self._stop.request()
        self._ranks.signal(signal.SIGTERM)

    def can_be_spared(self, child: Child) -> bool:
        """Whether the run goes on without it; what it says to be wrong with itself would be wrong with a successor."""
        if child.rank == LEADER and (child.kind or self.ended):
            return self.ended  # whose last word was of a run that is over
        spared = goes_on_without(
            child.rank,
            self._cast,
            self._job.strategy,
            self.absences.servers,
            leader_returns=self._leader_returns,
        )
        return child.kind in ("", PEER) and spared

    def welcome(self, newcomer: Peer, store: Any) -> None:
        """Tells a newcomer of those whom it would look for in vain."""
        if newcomer.rank in self._cast.workers:  # a server counts once it has its shards
            self.absences.fill(newcomer.rank)
        for lost in self.absences.news_for(newcomer):
            tell_of_loss(store, lost, newcomer)

    def tell_of_loss(self, lost: Peer, store: Any) -> None:
        """Tells all who are there that one is gone, or a place vacant."""
        self.absences.lose(lost)
        guests = set() if self.guests is None else self.guests.present
        for other in {child.peer for child in self._ranks.children if child.open} | guests:
            tell_of_loss(store, lost, other)

    @property
    def _leader_returns(self) -> bool:
        """Whether a successor of the leader would find all that it needs."""
        holders = self._cast.servers or self._cast.workers
        others = [child for child in self._ranks.children if child.rank in holders and child.rank != LEADER]
        all_there = all(child.open or child.failed for child in others)  # not one has been let go
        return self._ledger.began and all_there and self.succession.left > 0 and not self._stop.requested
