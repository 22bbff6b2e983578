"""The workers that train with this one, and how it goes on with those who are left when one of them is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import PeerLost
from polyrhythm.roles.regrouping.regroup import FormationSource, GroupRegroup, Member, Regroup
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

_Result = TypeVar("_Result")


class RegroupCoordinator(Protocol):
    """The part of `Coordinator` that regrouping needs."""

    @property
    def formations(self) -> FormationSource:
        """How this worker gets the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits there for others."""

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""


class WorkerGroup:
    """This worker's view of its group; where the strategy regroups, it recovers from the loss of a member.

    Args:
        world: where this rank is.
        strategy: says whether workers regroup, all together or each group apart.
        workers: the communicator of all workers.
        member: this one.
        coordinator: of this worker.

    Attributes:
        apart: regroups this worker's group, where groups regroup apart; else None.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        workers: Communicator,
        member: Member,
        coordinator: RegroupCoordinator,
    ) -> None:
        self._world = world
        self._part = member.part
        self._coordinator = coordinator
        self._regroup: Regroup | None = None
        self.apart: GroupRegroup | None = None
        faults = strategy.faults(workers.size)
        if faults.regroups:
            self._regroup = Regroup(world, coordinator.formations, member, workers)
            coordinator.wait_with(self._regroup)
        elif faults.regroups_apart:
            self.apart = GroupRegroup(world, faults, member)
        self._regrouping = self._regroup or self.apart

    @property
    def regroups(self) -> bool:
        """Whether the group goes on without a lost member."""
        return self._regrouping is not None

    @property
    def members(self) -> tuple[int, ...] | None:
        """Indices of the workers that go in step now; None where not all workers regroup together."""
        return None if self._regroup is None else self._regroup.members

    @property
    def let_in(self) -> bool:
        """Whether this worker is a successor that was let in where workers go in step."""
        return self._regroup is not None and self._world.rejoins

    @property
    def over(self) -> bool:
        """Whether the others have ended the run."""
        return self._regrouping is not None and self._regrouping.over

    @property
    def stops(self) -> bool:
        """Whether no step is left to take: the others have ended, or stopped at this worker's step."""
        return self.over or self._part.has_stopped

    def stop(self) -> None:
        """Notes that this worker stops early; where all replicas are equal, successors then find the run over."""
        if self._regroup is not None and self._part.replicated:
            self._regroup.over = True

    @property
    def step(self) -> int:
        """Steps that this worker has done; the last may have been taken over from another worker."""
        assert self._regrouping is not None, "kept only where workers regroup"
        return self._regrouping.step

    @step.setter
    def step(self, step: int) -> None:
        if self._regrouping is not None:
            self._regrouping.step = step

    def start(self, step: int) -> int:
        """Starts the strategy's part with the others, or enters as a successor; gives the step to begin with.

        Args:
            step: where this worker would start by itself.
        """
        if self._regrouping is None:
            return self._retrying_with_new_leader(lambda: self._part.start(step))
        if self._world.rejoins:
            self._regrouping.enter()
            return self.step
        if self._world.leads:  # its parameters are those that the others get
            self.step = step
        started = self.run_or_regroup(lambda: self._part.start(step))
        if started is not None:
            self.step = started
        return self.step

    def run_or_regroup(self, act: Callable[[], _Result]) -> _Result | None:
        """Calls `act`, which communicates with the others; gives its result, or None after regrouping instead.

        Raises:
            PeerLost: a rank is gone without which the run cannot go on.
        """
        try:
            return act()
        except PeerLost as loss:
            if self._regrouping is None or not self._regrouping.recovers_from(loss):
                raise
        self._regrouping.reform()  # out here, where the error no longer holds what was under way
        return None

    def _retrying_with_new_leader(self, act: Callable[[], _Result]) -> _Result:
        """Calls `act`, which waits for the leader; again with its successor, if it is lost meanwhile."""
        while True:
            try:
                return act()
            except PeerLost as loss:
                if not self._coordinator.recovers_from(loss):
                    raise

    def check(self, step: int) -> None:
        """Called before a step: has `run_or_regroup` regroup if a successor waits to be let in.

        Args:
            step: its number.

        Raises:
            PeerLost: one waits.
        """
        if self._regrouping is not None:
            self._regrouping.check(step)

    def end(self) -> None:
        """Ends the strategy's part; with those who are left, if members are lost meanwhile."""
        if self.apart is not None:
            self._end_apart(self.apart)
            return
        if self._regroup is None:
            self._retrying_with_new_leader(self._part.end)
            return
        while not self._regroup.over:
            try:
                self._part.end()
                self._regroup.over = True
            except PeerLost:
                self._regroup.reform()

    def _end_apart(self, group: GroupRegroup) -> None:
        while True:
            try:
                self._part.end()
                group.over = True
                return
            except PeerLost as loss:
                if not group.recovers_from(loss):
                    raise
            group.reform()
