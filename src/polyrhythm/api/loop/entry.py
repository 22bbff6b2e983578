"""How the workers of a user's loop come together: at the beginning, and as successors of those who were lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from polyrhythm.api.loop.bulletin import Bulletin
from polyrhythm.api.loop.course import Course
from polyrhythm.api.loop.epochs import Begun, begun_key
from polyrhythm.api.loop.leader import LoopLeader
from polyrhythm.errors import PeerLost
from polyrhythm.launch.places import Place, Places
from polyrhythm.roles.line import Line
from polyrhythm.roles.regrouping.company import Company
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import join, share_untrained
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy


class LoopEntry:
    """One worker's; see `Entry`.

    Args:
        world: where this rank is.
        strategy: says how losses are borne.
        bulletin: where workers leave word.
        places: of the workers.
        course: how far this worker's loop has come.
        leader: its desk, if it leads.

    Attributes:
        rejoins: whether this worker is a successor, and the others are under way.
        waits: whether successors wait for the beginning of an epoch.
        leaves_out: batches of the next epoch that whoever came before has taken.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        bulletin: Bulletin,
        places: Places,
        course: Course,
        leader: LoopLeader | None,
    ) -> None:
        self.rejoins = world.rejoins
        self.waits = strategy.regroups(len(world.cast.workers))
        self.leaves_out = 0
        self._world = world
        self._strategy = strategy
        self._bulletin = bulletin
        self._places = places
        self._course = course
        self._leader = leader
        self._worker = world.cast.workers.index(world.network.rank)
        self._company: Company | None = None

    def begin(self, replica: Replica, company: Company, step: int) -> int:
        """Starts a replica with all others, or among them; gives the step to begin with.

        Args:
            replica: this worker's.
            company: the others.
            step: where it would start.
        """
        self._company = company
        if self.rejoins:
            return self._join(replica, company, step)
        if self._strategy.goes_on(len(self._world.cast.workers)):
            share_untrained(self._world, replica)
        else:
            replica.share_untrained()
        return company.start(step)

    def let_in(self, begun: Begun, entering: Sequence[int]) -> None:
        """Lets those in who wait at the door, if this worker leads; the others break their next step off for it."""
        if self._leader is None or not entering:
            return
        for worker in entering:
            self._bulletin.tell(_entered_key(worker), begun.to_text())
        if self._leader.admit(entering, lambda worker: self._places.of(worker) is not Place.WAITING):
            assert self._company is not None, "training has begun"
            self._company.regroup()

    def present(self) -> tuple[list[int], list[int]]:
        """Gives the workers that are to have a share of what begins, and who of them wait to be let in.

        Those who go in step know who does; others hear of losses from the launcher, some earlier than others.
        """
        places = self._places.read()
        waiting = [worker for worker, place in enumerate(places) if place is Place.WAITING]
        members = None if self._company is None else self._company.members
        if members is None:
            members = tuple(worker for worker, place in enumerate(places) if place is Place.HERE)
        return sorted({*members, *waiting}), waiting

    def entered(self) -> Begun:
        """Says that this worker, a successor, is there; gives the epoch with which it begins."""
        self._places.set(self._worker, Place.HERE)
        key = _entered_key(self._worker) if self.waits else begun_key(self._worker)
        return Begun.from_text(self._bulletin.told(key))

    def go_on(self, begun: Begun) -> None:
        """Goes on behind what whoever came before has taken, or with the step with which the others are."""
        assert self._course.optimizer is not None, "a loop has something to train"
        if self.waits:
            self._course.optimizer.go_on_at(begun.steps)
        else:
            self.leaves_out = max(0, self._course.optimizer.steps - begun.steps)

    def _join(self, replica: Replica, company: Company, step: int) -> int:
        if self.waits:
            self._places.set(self._worker, Place.WAITING)
        try:
            join(self._world, replica, Line(self._world, self._strategy))
            return company.start(step)
        except PeerLost as loss:
            print(f"polyrhythm: worker {self._worker} is not let in any more: {loss}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(0)


def _entered_key(worker: int) -> str:
    return f"script/entered/{worker}"
