"""How the leader makes the next membership view: it waits for all that are there, and says who goes on.

    worker breaks a step off ─▶ StepBroken(view, progress) ─┐
    successor of a lost one  ─▶ EnterWorker ────────────────┼─▶ pending members: all have answered ─▶ view
    worker is lost, or has left ────────────────────────────┘

The leader does not wait for workers that have left or are about to. But a leader that has just come holds
nothing, and at the very end there may be no other worker to have it from: those who only wait for permission
to leave take part once more.

The successor of a leader knows of no view. The messages that it receives are all addressed to it, so each is
of the latest view that its worker took part in; the highest number counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from polyrhythm.errors import PeerLost
from polyrhythm.roles.control_messages import (
    NOTHING,
    ControlMessage,
    EnterLeader,
    MembershipView,
    Progress,
    RegroupAt,
    StepBroken,
)
from polyrhythm.roles.ledger import Attendance
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy


class LeaderMessages(Protocol):
    """What making views needs of the leader's messages.

    Attributes:
        attendance: of the workers.
    """

    attendance: Attendance

    def read(self) -> None:
        """Handle the messages that have arrived, without waiting."""

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Handle messages as they arrive, until `enough` returns true."""

    def is_final(self, worker: int) -> bool:
        """Whether a worker has sent its final state."""

    def tell_worker(self, worker: int, message: ControlMessage) -> None:
        """Send a worker a message, unless it is lost."""


class RegroupCoordinator:
    """Makes views on the leader, for all workers.

    Args:
        world: where it is.
        strategy: says whether others listen for a leader's word between steps.
        messages: between the leader and the workers.

    Attributes:
        pending: who waits for the next view.
        left: workers that have left in good order.
    """

    def __init__(self, world: World, strategy: Strategy, messages: LeaderMessages) -> None:
        self._generation = world.generation
        self._calls = world.goes_on_without(LEADER, strategy.faults(len(world.roles.workers)))
        self._called: int | None = None
        self._messages = messages
        self.pending = PendingMembers(len(world.roles.workers), world.generation)
        self.left: set[int] = set()

    def call_due(self, number: int, step: int, *, wait: bool) -> bool:
        """Whether somebody is let in before this step, or before the next: all are called, so nobody loses one."""
        self._messages.read()
        if self.pending.broken_off:
            return True
        if self._called is None and self.pending.due:
            self._called = step
            if wait and self._calls:
                self._called += 1
                for worker in self._staying() - {LEADER}:
                    self._messages.tell_worker(worker, RegroupAt(number, self._called))
        return self._called is not None and step >= self._called

    def next_view(self, word: StepBroken) -> MembershipView:
        """Wait until all who are there have broken their step off, come or left; tell them who goes on."""
        self._called = None
        awaited, called = self._staying, set[int]()
        if word.progress == NOTHING:
            awaited = self._there

        def complete() -> bool:
            if word.progress == NOTHING and self.pending.called:
                called.update(self._call_back(but=called))
            return self.pending.complete(awaited())

        self._messages.read_until(complete)
        view = self.pending.form(word.progress, awaited())
        for worker in view.workers[1:]:
            self._messages.tell_worker(worker, view)
        return view

    def _staying(self) -> set[int]:
        """Workers that are there, and have not said that they leave."""
        present = self._messages.attendance.present
        return {worker for worker in present if not self._messages.is_final(worker)}

    def _there(self) -> set[int]:
        return self._messages.attendance.present - self.left

    def _call_back(self, but: set[int]) -> set[int]:
        """Call those who were through with this leader's last view, and only wait for leave to go."""
        through = {
            worker
            for worker in self.pending.view.workers
            if worker not in but and self._messages.is_final(worker) and not self.pending.waits(worker)
        }
        for worker in through:
            self._messages.tell_worker(worker, EnterLeader(self._generation))
        return through


class NobodyLeft(PeerLost):
    """All who held the run's parameters are gone."""

    def __init__(self) -> None:
        super().__init__(LEADER, "mustering the workers")
        self.args = ("all workers that held the parameters are lost, with worker 0",)


class PendingMembers:
    """Collects who waits for the next view, and makes it.

    Args:
        workers: how many there are at first.
        generation: how many have led before.

    Attributes:
        view: the present one.
        called: whether it is this leader's.
    """

    def __init__(self, workers: int, generation: int = 0) -> None:
        self.view = MembershipView(number=0, workers=tuple(range(workers)))
        self.called = False
        self._everyone = frozenset(range(workers))
        self._waiting: dict[int, Progress] = {}
        self._generations = {LEADER: generation}

    @property
    def due(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    @property
    def broken_off(self) -> bool:
        """Whether one of those waits who were taking steps."""
        return any(done != NOTHING for done in self._waiting.values())

    def on_message(self, worker: int, word: StepBroken) -> None:
        """Note that a worker has broken a step off; what it said of an earlier view counts no more."""
        if word.view is not None and word.number > self.view.number:
            self.view = word.view
        elif word.number < self.view.number and self.called and word.progress != NOTHING:
            return
        self._waiting[worker] = word.progress
        self._generations[worker] = word.generation

    def enter(self, worker: int, generation: int) -> None:
        """Note that a successor wants to take part."""
        self._waiting[worker] = NOTHING
        self._generations[worker] = generation

    def lose(self, worker: int) -> None:
        """Strike a worker off."""
        self._waiting.pop(worker, None)

    def waits(self, worker: int) -> bool:
        """Whether a worker waits."""
        return worker in self._waiting

    def complete(self, awaited: Collection[int]) -> bool:
        """Whether all of these wait; the leader need not say so to itself."""
        return all(worker in self._waiting for worker in awaited if worker != LEADER)

    def form(self, leader: Progress, awaited: Collection[int]) -> MembershipView:
        """Make the next view of the leader and of those who wait.

        Args:
            leader: how far it has come.
            awaited: who is there and has not left.

        Raises:
            NobodyLeft: nobody has anything to go on with.
        """
        done = {worker: self._waiting.get(worker, NOTHING) for worker in awaited} | {LEADER: leader}
        most = max(done.values())
        if most == NOTHING:
            raise NobodyLeft
        workers = tuple(sorted(done))
        self.view = MembershipView(
            number=self.view.number + 1,
            workers=workers,
            generations=tuple(self._generations.get(worker, 0) for worker in workers),
            step=most.steps,
            newest=next(worker for worker in workers if done[worker] == most),
            behind=tuple(worker for worker in workers if _is_behind(done[worker], most)),
            over=most.over,
            absences=(*self.view.absences, (most.steps, tuple(sorted(self._everyone - set(workers))))),
            missed=(*self.view.missed, *((most.steps, worker) for worker in self._gone(workers))),
        )
        self.called = True
        self._waiting.clear()
        return self.view

    def _gone(self, workers: Collection[int]) -> list[int]:
        """Return those of the view before that are there no more, or others in their place."""
        before = dict(zip(self.view.workers, self.view.generations, strict=False))
        return [
            worker
            for worker in self.view.workers
            if worker not in workers or self._generations.get(worker, 0) != before.get(worker, 0)
        ]


def _is_behind(done: Progress, most: Progress) -> bool:
    """Whether a worker has met the others less often than the newest, at the very end among others."""
    return (done.over, done.meetings) < (most.over, most.meetings)
