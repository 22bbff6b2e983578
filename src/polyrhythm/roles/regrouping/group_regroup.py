"""Regrouping apart: those who are left of a worker's group go on with each other, and other groups take no notice.

member                                 server (`GroupServer`)
a collective of the group breaks       hears of the loss, or a successor asks to be let in
gives up what was under way ─────────▶ waits for this word of all of the group who are there
◀───────────────────────────────────── who goes on together
all: begin anew at what the servers have of the group
"""

from __future__ import annotations

from polyrhythm.communication.transports.collective_broken import UNKNOWN_RANK
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.roles.regrouping.formation import NOTHING_DONE
from polyrhythm.roles.regrouping.regroup import Member
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

_MOST_IN_VAIN = 100


class GroupRegroup:
    """Takes one worker from formation to formation of its group.

    Args:
        world: where this rank is.
        strategy: which `regroups_apart`.
        member: what it brings.

    Attributes:
        step: steps that this worker has done; kept by its loop.
        over: whether its group has done all that there is to do.
    """

    def __init__(self, world: World, strategy: Strategy, member: Member) -> None:
        self.step = NOTHING_DONE
        self.over = False
        self._world = world
        self._strategy = strategy
        self._member = member
        self._in_vain = 0
        self._there: tuple[int, ...] | None = None
        self._missed: set[int] = set()

    @property
    def due(self) -> bool:
        """Whether somebody of the present formation is lost, so that the others may wait for this worker."""
        return bool(self._missed) and not self.over

    def lose(self, worker: int) -> None:
        """Notes that a worker of the same group is lost, while this one waits for others elsewhere."""
        if self._there is None or worker in self._there:
            self._missed.add(worker)

    def recovers_from(self, loss: PeerLost) -> bool:
        """Whether a worker is lost that the run can go on without; the loss of a server is handled elsewhere."""
        if loss.rank in (UNKNOWN_RANK, self._world.network.rank):
            return True
        workers = self._world.cast.workers
        return loss.rank in workers and self._world.goes_on_without(loss.rank, self._strategy)

    def check(self, step: int) -> None:
        """Called before a step: raises if a successor waits to be let into the group.

        Args:
            step: its number.

        Raises:
            PeerLost: one waits.
        """
        self._in_vain = 0
        if self._member.part.due:
            raise PeerLost(self._world.network.rank, "letting a worker in")

    def reform(self) -> None:
        """Regroups with those of the group who are there.

        Raises:
            PeerLost: somebody is gone whom the run needs.
            RunError: it has been tried again and again, and no step came of it.
        """
        self._reassemble(enters=False)

    def enter(self) -> None:
        """Enters the group, as a successor.

        Raises:
            PeerLost: somebody is gone whom the run needs, or the run is ending.
        """
        self._reassemble(enters=True)

    def _reassemble(self, *, enters: bool) -> None:
        while True:
            self._in_vain += 1
            if self._in_vain > _MOST_IN_VAIN:
                raise RunError(f"a group has regrouped {_MOST_IN_VAIN} times, and no step came of it")
            try:
                found = self._member.part.reassemble(enters=enters)
                break
            except PeerLost as loss:
                if not self.recovers_from(loss):
                    raise
            enters = False  # it has been let in, and another was lost since
        self.step, self.over, self._there = found.step, found.over, found.there
        self._missed.intersection_update(found.there)
        if not found.over:
            place = found.there.index(self._member.worker)
            self._member.stands_in(found.absent, place, len(found.there))
