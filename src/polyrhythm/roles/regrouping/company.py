"""A worker among the others of its run: where the strategy regroups, it bears their loss with those who are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import PeerLost
from polyrhythm.roles.regrouping.group_regroup import GroupRegroup
from polyrhythm.roles.regrouping.regroup import Member, Regroup, Side
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

_Result = TypeVar("_Result")


class Reception(Protocol):
    """Where a worker hears of others; a part of `Desk`."""

    @property
    def side(self) -> Side:
        """How this worker comes to the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others there."""

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, if it is the leader that is lost, and that is borne; gives whether it is."""


class Company:
    """One worker's.

    Args:
        world: where this rank is.
        strategy: says whether it regroups.
        workers: the communicator of all workers.
        member: this one.
        desk: where it hears of others.

    Attributes:
        apart: its way from formation to formation of its group, where groups regroup apart.
    """

    def __init__(
        self, world: World, strategy: Strategy, workers: Communicator, member: Member, desk: Reception
    ) -> None:
        self._world = world
        self._part = member.part
        self._desk = desk
        self._regroup: Regroup | None = None
        self.apart: GroupRegroup | None = None
        if strategy.regroups(workers.size):
            self._regroup = Regroup(world, desk.side, member, workers)
            desk.wait_with(self._regroup)
        elif strategy.regroups_apart(workers.size):
            self.apart = GroupRegroup(world, strategy, member)
        self._either = self._regroup or self.apart

    @property
    def regroups(self) -> bool:
        """Whether those who are left of this worker's company go on with each other."""
        return self._either is not None

    @property
    def members(self) -> tuple[int, ...] | None:
        """The workers that go in step now, by their indices; None where workers do not regroup."""
        return None if self._regroup is None else self._regroup.members

    @property
    def let_in(self) -> bool:
        """Whether this worker is a successor that has been let in among those who go in step."""
        return self._regroup is not None and self._world.rejoins

    @property
    def over(self) -> bool:
        """Whether the others have ended, so that nothing is left to do."""
        return self._either is not None and self._either.over

    @property
    def stops(self) -> bool:
        """Whether the others have ended, or stopped where this worker is, so that no step is left to take."""
        return self.over or self._part.has_stopped

    def stop(self) -> None:
        """Notes that this worker stops early: where all hold the same, who comes now finds the run over."""
        if self._regroup is not None and self._part.replicated:
            self._regroup.over = True

    @property
    def step(self) -> int:
        """Steps that this worker has done, of which one may have been another's."""
        assert self._either is not None, "kept only where workers regroup"
        return self._either.step

    @step.setter
    def step(self, step: int) -> None:
        if self._either is not None:
            self._either.step = step

    def start(self, step: int) -> int:
        """Starts the part with the others', or lets a successor in; gives the step to begin with.

        Args:
            step: where it would start.
        """
        if self._either is None:
            return self._with_whoever_leads(lambda: self._part.start(step))
        if self._world.rejoins:
            self._either.enter()
            return self.step
        if self._world.leads:  # its parameters are those that the others get
            self.step = step
        started = self.bear(lambda: self._part.start(step))
        if started is not None:
            self.step = started
        return self.step

    def bear(self, act: Callable[[], _Result]) -> _Result | None:
        """Does something with the others; gives what it gives, or None where they had to regroup instead.

        Raises:
            PeerLost: a rank is gone without which the run cannot go on.
        """
        try:
            return act()
        except PeerLost as loss:
            if self._either is None or not self._either.bears(loss):
                raise
        self._either.mend()  # out here, where the error no longer holds what was under way
        return None

    def _with_whoever_leads(self, act: Callable[[], _Result]) -> _Result:
        """Does what needs the leader's word; again, if it is lost before it has said it."""
        while True:
            try:
                return act()
            except PeerLost as loss:
                if not self._desk.bears(loss):
                    raise

    def look(self, step: int) -> None:
        """Breaks off if somebody waits to be let in; called before a step.

        Args:
            step: its number.

        Raises:
            PeerLost: so it is.
        """
        if self._either is not None:
            self._either.look(step)

    def end(self) -> None:
        """Ends the part; with those who are left, if some are lost meanwhile."""
        if self.apart is not None:
            self._end_apart(self.apart)
            return
        if self._regroup is None:
            self._with_whoever_leads(self._part.end)
            return
        while not self._regroup.over:
            try:
                self._part.end()
                self._regroup.over = True
            except PeerLost:
                self._regroup.mend()

    def _end_apart(self, group: GroupRegroup) -> None:
        while True:
            try:
                self._part.end()
                group.over = True
                return
            except PeerLost as loss:
                if not group.bears(loss):
                    raise
            group.mend()
