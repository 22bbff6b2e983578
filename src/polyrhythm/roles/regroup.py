"""Regrouping: workers in lockstep go on without one that is lost, or with one that has joined.

    worker                               leader (worker 0)
                                           a successor has come: calls all to break off before a step to come
      a collective breaks, or it is time   one breaks, or a worker says so, or it is time
      revoke ────────────────────────────▶ revoke ──────────▶ all others: whatever they wait for breaks
      StepBroken(view, progress) ────────▶ waits for this message from all workers that are there
      ◀──────────── membership view(workers, steps, who is newest, who is behind)
      the newest ─▶ those who are behind: parameters, and the state of its part
      all: their parts go on with the new communicator; a step that broke is begun again

After Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication capability",
IJHPCA 2013 (revoke, shrink, agree), with the leader in place of the agreement: if it is lost, its successor
asks all again.

A membership view is the set of workers that train together, and how far they have come. A
worker that has met the others waits for all of them at the next meeting, which is every step or seldom. So
the result of a meeting is held by some worker, which hands it on, or by none, and they meet again. The leader
may be lost like any other worker: what it knew of earlier views travels in each view, so that any member of
the latest one can tell its successor.

A worker that does not lead asks the leader for the next view, or its successor:

worker                          leader     its successor
  StepBroken ────────────────────▶ dies
  waits: no message of the old one is answered
  ◀─────────────────────────────────── EnterLeader
  StepBroken, with the view that broke ────▶ collects the pending members

Where groups regroup apart (`GroupRegroup`), those who are left of a worker's group go on with each other, and
other groups are not involved:

member                                 server (`GroupServer`)
a collective of the group breaks       hears of the loss, or a successor asks to be let in
gives up what was under way ─────────▶ waits for this message from all members of the group that are there
◀───────────────────────────────────── who goes on together
all: begin anew at what the servers have of the group

The leader (`RegroupCoordinator`) makes the next view when all that are there have answered:

    worker breaks a step off ─▶ StepBroken(view, progress) ─┐
    successor of a lost one  ─▶ EnterWorker ────────────────┼─▶ pending members: all have answered ─▶ view
    worker is lost, or has left ────────────────────────────┘

It does not wait for workers that have left or are about to. But a leader that has just come holds nothing, and at the
very end there may be no other worker to have it from: those who only wait for permission to leave take part once more.
Such a leader knows of no view either. The messages that it receives are all addressed to it, so each is of the latest
view that its worker took part in; the highest number counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.log import Report, form
from polyrhythm.communication.message import Message
from polyrhythm.communication.transports.member_collectives import UNKNOWN_RANK
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.roles.control_messages import (
    NOTHING,
    NOTHING_DONE,
    ControlMessage,
    EnterLeader,
    Handover,
    MembershipView,
    Progress,
    RegroupAt,
    StepBroken,
)
from polyrhythm.roles.ledger import Attendance
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerCalls
from polyrhythm.training.flat_parameters import FlatParameters

_MOST_ATTEMPTS = 100


class RegroupControl(Protocol):
    """What regrouping needs of the control plane: the leader makes views, other workers ask it for them."""

    def wait_with(self, regroup: Regroup | GroupRegroup) -> None:
        """Set what regroups this worker while it waits there for others."""

    def await_leader(self, loss: PeerLost) -> bool:
        """Wait for a new leader, if the lost rank led and the run survives that; return whether it does."""

    def call_due(self, number: int, step: int, *, wait: bool) -> bool:
        """Whether this worker must regroup before a step, since another waits for a view.

        Args:
            number: of the present view.
            step: the step's number.
            wait: whether regrouping before the step after it would do as well.
        """

    def next_view(self, word: StepBroken) -> MembershipView:
        """Wait for the next view, made once all who are there have said how far they have come.

        Args:
            word: how far this worker has come.

        Raises:
            PeerLost: somebody is gone whom the run needs.
        """


@dataclass(frozen=True)
class Participant:
    """What a worker brings into a view.

    Attributes:
        worker: its index.
        part: its side of the strategy.
        flat: its parameters and gradients.
        takes_place: called after each view with this worker's place among its members, and their number; it shares out
            the data.
        stands_in: called instead where a group regroups apart: with the absent workers of the group, this worker's
            place among those present, and their number.
        param_groups: of the user's own optimizer, where that makes the steps: its loop sets their options.
    """

    worker: int
    part: WorkerCalls
    flat: FlatParameters
    takes_place: Callable[[int, int], None]
    stands_in: Callable[[tuple[int, ...], int, int], None]
    param_groups: Sequence[dict[str, Any]] = ()


class Regroup:
    """Takes one worker from view to view: a view is the set of workers that train together.

    Args:
        world: where this rank is.
        control: where views come from.
        member: what the worker brings.
        workers: the communicator of all workers, which the part has been made with.

    Attributes:
        step: steps that this worker has done; kept by its loop.
        over: whether it has done all that there is to do.
    """

    def __init__(
        self, world: World, control: RegroupControl, member: Participant, workers: Communicator
    ) -> None:
        self.step = NOTHING_DONE
        self.over = False
        self._world = world
        self._control = control
        self._member = member
        self._workers = workers
        self._everyone = tuple(range(workers.size))
        self._view: MembershipView | None = None
        self._attempts = 0
        self._agreed = False
        """Whether the leader asked for this regrouping, and so revokes the communicator itself."""
        if not world.rejoins:  # else nobody uses this one any more
            workers.revoke_without(LEADER)  # the leader would have passed a revocation on

    @property
    def leader(self) -> int:
        """How many have led before the one in whose view this worker is."""
        return 0 if self._view is None else self._view.leader

    @property
    def number(self) -> int:
        """How many views there have been before the present one."""
        return 0 if self._view is None else self._view.number

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of the present view, by their indices."""
        return self._everyone if self._view is None else self._view.workers

    @property
    def workers(self) -> Communicator:
        """Those of the present view."""
        return self._workers

    def check(self, step: int) -> None:
        """Called before a step: raises if a worker waits for the next view.

        Only before a step in which all communicate, so that the others notice soon.

        Args:
            step: its number.

        Raises:
            PeerLost: one waits.
        """
        self._attempts = 0
        part = self._member.part
        if not part.lets_in(step):
            return
        if self._control.call_due(self.number, step, wait=part.lets_in(step + 1)):
            self._agreed = not self._world.leads
            raise PeerLost(self._world.network.rank, "letting a worker in")

    def recovers_from(self, loss: PeerLost) -> bool:
        """Always: whether the run can go on is known only after asking the others."""
        return True

    def reform(self) -> None:
        """Regroup with whoever is there, until a view holds; then all have met equally often.

        Raises:
            PeerLost: somebody is gone whom the run needs.
            RunError: it has been tried again and again, and nobody was lost.
        """
        while True:
            self._begin_attempt()
            self._member.part.break_off()
            if self.step != NOTHING_DONE:
                self.step = self._member.part.begun_again(self.step)
            if self._took_place(self._control.next_view(self._word)):
                return

    def _begin_attempt(self) -> None:
        """Have all others leave what they wait for."""
        self._attempts += 1
        if self._attempts > _MOST_ATTEMPTS:
            raise RunError(f"workers have regrouped {_MOST_ATTEMPTS} times, and no step came of it")
        if not self._agreed:
            self._workers.revoke()
        self._agreed = False

    def enter(self) -> None:
        """Enter the first view, as a successor that has asked to, or that leads.

        Raises:
            PeerLost: somebody is gone whom the run needs.
        """
        if not self._took_place(self._control.next_view(self._word)):
            self.reform()

    @property
    def _word(self) -> StepBroken:
        view, progress = self._view, NOTHING
        if self.step != NOTHING_DONE:
            progress = Progress(self._member.part.meetings(self.step), self.step, over=self.over)
        generation = self._world.generation
        return StepBroken(number=self.number, progress=progress, generation=generation, view=view)

    def _took_place(self, view: MembershipView) -> bool:
        try:
            self._take_place(view)
        except PeerLost:
            return False
        return True

    def _take_place(self, view: MembershipView) -> None:
        member, workers = self._member, view.workers
        self._view = view
        ranks = [self._world.roles.workers[worker] for worker in workers]
        self._workers = self._world.network.regrouped(view.name, ranks, view.generations)
        self._workers.revoke_without(LEADER)
        if member.worker == view.newest:
            for other in view.behind:
                self._workers.send(workers.index(other), self._handover())
        elif member.worker in view.behind:
            message = self._workers.receive(workers.index(view.newest))[1]
            self._take_over(Handover.from_message(message), view)
        self.over = view.over
        member.flat.renew_gradients()  # the library may still write into the old ones
        if self.over:  # nothing is left but to leave with what there is
            return
        observer, rank = self._world.observer, self._world.network.rank
        if observer is not None:
            observer.joined(rank, ranks, view.name)
        member.part.regroup(self._workers, workers)
        if observer is not None:
            observer.regrouped(rank, member.flat.vector)
        member.takes_place(workers.index(member.worker), len(workers))

    def _handover(self) -> Message:
        tensors, facts = self._member.part.state()
        return Handover(self._member.flat.vector, tensors, facts).message()

    def _take_over(self, newest: Handover, view: MembershipView) -> None:
        self._member.flat.vector.copy_(newest.vector)
        under_way = self.step != NOTHING_DONE
        # Its loop has set them as it had come, and is yet to pass the scheduler that the newest worker's has passed.
        kept = [{**group} for group in self._member.param_groups] if under_way else []
        step = self._member.part.take_over((newest.part, newest.part_facts), self.step, view.step)
        for group, options in zip(self._member.param_groups, kept, strict=under_way):
            group.update(options)
        if self._world.observer is not None:
            self._world.observer.caught_up(self._world.network.rank, step)
        self.step = view.step if view.over else step


class GroupRegroup:
    """Takes one worker from view to view of its group.

    Args:
        world: where this rank is.
        faults: of the strategy, which regroups apart.
        member: what it brings.

    Attributes:
        step: steps that this worker has done; kept by its loop.
        over: whether its group has done all that there is to do.
        number: how often the group has regrouped.
    """

    def __init__(self, world: World, faults: FaultPolicy, member: Participant) -> None:
        self.step = NOTHING_DONE
        self.over = False
        self.number = 0
        self._world = world
        self._faults = faults
        self._member = member
        self._attempts = 0
        self._there: dict[int, int] | None = None
        self._losses: dict[int, int] = {}

    @property
    def there(self) -> tuple[int, ...]:
        """Indices of the workers of the group that are there, once it has regrouped."""
        assert self._there is not None, "the group has not regrouped"
        return tuple(self._there)

    @property
    def due(self) -> bool:
        """Whether somebody of the present view is lost, so that the others may wait for this worker."""
        if self.over:
            return False
        there = self._there
        return any(there is None or there.get(worker, lost) < lost for worker, lost in self._losses.items())

    def lose(self, worker: int, losses: int) -> None:
        """Note that a worker of the same group is lost, while this one waits for others elsewhere.

        Args:
            worker: its index.
            losses: how many processes have been lost that had its rank.
        """
        self._losses[worker] = losses

    def recovers_from(self, loss: PeerLost) -> bool:
        """Whether a worker is lost that the run can go on without; the loss of a server is handled elsewhere."""
        if loss.rank in (UNKNOWN_RANK, self._world.network.rank):
            return True
        workers = self._world.roles.workers
        return loss.rank in workers and self._world.goes_on_without(loss.rank, self._faults)

    def check(self, step: int) -> None:
        """Called before a step: raises if a successor waits to be let into the group.

        Args:
            step: its number.

        Raises:
            PeerLost: one waits.
        """
        self._attempts = 0
        if self._member.part.due:
            raise PeerLost(self._world.network.rank, "letting a worker in")

    def reform(self) -> None:
        """Regroup with those of the group who are there.

        Raises:
            PeerLost: somebody is gone whom the run needs.
            RunError: it has been tried again and again, and no step came of it.
        """
        self._reassemble(enters=False)

    def enter(self) -> None:
        """Enter the group, as a successor.

        Raises:
            PeerLost: somebody is gone whom the run needs, or the run is ending.
        """
        self._reassemble(enters=True)

    def _reassemble(self, *, enters: bool) -> None:
        while True:
            self._attempts += 1
            if self._attempts > _MOST_ATTEMPTS:
                raise RunError(f"a group has regrouped {_MOST_ATTEMPTS} times, and no step came of it")
            try:
                found = self._member.part.reassemble(enters=enters)
                break
            except PeerLost as loss:
                if not self.recovers_from(loss):
                    raise
            enters = False  # it has been let in, and another was lost since
        self.step, self.over, self._there = found.step, found.over, found.there
        self.number += 1
        if self._world.observer is not None:
            rank, workers = self._world.network.rank, self._world.roles.workers
            there = (rank,) if found.over else tuple(workers[worker] for worker in found.there)
            self._world.observer.joined(rank, there, found.round)
            self._world.observer.regrouped(rank, self._member.flat.vector, found.step)
        if not found.over:
            place = list(found.there).index(self._member.worker)
            self._member.stands_in(found.absent, place, len(found.there))


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
        if word.fresh:
            awaited = self._there

        def complete() -> bool:
            if word.fresh and self.pending.called:
                called.update(self._call_back(but=called))
            return self.pending.complete(awaited())

        self._messages.read_until(complete)
        view = self.pending.form(word.report or word.progress, awaited())
        for worker in view.workers:
            if worker != LEADER:
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
        self._waiting: dict[int, Progress | Report] = {}
        self._generations = {LEADER: generation}

    @property
    def due(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    @property
    def broken_off(self) -> bool:
        """Whether one of those waits who were taking steps."""
        return not all(map(_is_fresh, self._waiting.values()))

    def on_message(self, worker: int, word: StepBroken) -> None:
        """Note that a worker has broken a step off; what it said of an earlier view counts no more."""
        if word.view is not None and word.number > self.view.number:
            self.view = word.view
        elif word.number < self.view.number and self.called and not word.fresh:
            return
        self._waiting[worker] = word.report or word.progress
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

    def form(self, leader: Progress | Report, awaited: Collection[int]) -> MembershipView:
        """Make the next view of the leader and of those who wait.

        Args:
            leader: how far it has come.
            awaited: who is there and has not left.

        Raises:
            NobodyLeft: nobody has anything to go on with.
        """
        told = {worker: self._waiting.get(worker, NOTHING) for worker in awaited} | {LEADER: leader}
        done = {worker: each for worker, each in told.items() if isinstance(each, Progress)}
        reports = {worker: each for worker, each in told.items() if isinstance(each, Report)}
        if reports:
            return self._formed_of_logs(reports | dict.fromkeys(done, Report()))
        return self._formed(done)

    def _formed(self, done: dict[int, Progress]) -> MembershipView:
        most = max(done.values())
        if most == NOTHING:
            raise NobodyLeft
        workers = tuple(sorted(done))
        return self._next(
            workers,
            step=most.steps,
            newest=next(worker for worker in workers if done[worker] == most),
            behind=tuple(worker for worker in workers if _is_behind(done[worker], most)),
            over=most.over,
        )

    def _formed_of_logs(self, reports: dict[int, Report]) -> MembershipView:
        """Make the next view of workers whose exchanges are entries of a log."""
        formed = form(reports)
        if formed is None:
            raise NobodyLeft
        most = reports[formed.newest]
        lost = [(most.since, most.steps + most.inside) for _ in self._gone(formed.members)]
        return self._next(
            formed.members,
            step=most.steps,
            newest=formed.newest,
            over=most.over,
            since=(*self.view.since, *lost),
            begins=formed.begins,
            gives=formed.gives,
            hands=formed.hands,
        )

    def _next(self, workers: tuple[int, ...], *, step: int, **more: Any) -> MembershipView:
        absent = tuple(sorted(self._everyone - set(workers)))
        self.view = MembershipView(
            number=self.view.number + 1,
            workers=workers,
            generations=tuple(self._generations.get(worker, 0) for worker in workers),
            step=step,
            absences=(*self.view.absences, (step, absent)),
            missed=(*self.view.missed, *((step, worker) for worker in self._gone(workers))),
            **more,
        )
        self.called = True
        self._waiting = {}
        return self.view

    def _gone(self, workers: Collection[int]) -> list[int]:
        """Return those of the view before that are there no more, or others in their place."""
        before = dict(zip(self.view.workers, self.view.generations, strict=False))
        return [
            worker
            for worker in self.view.workers
            if worker not in workers or self._generations.get(worker, 0) != before.get(worker, 0)
        ]


def _is_fresh(done: Progress | Report) -> bool:
    """Return whether a worker has nothing to go on with."""
    return done.fresh if isinstance(done, Report) else done == NOTHING


def _is_behind(done: Progress, most: Progress) -> bool:
    """Whether a worker has met the others less often than the newest, at the very end among others."""
    return (done.over, done.meetings) < (most.over, most.meetings)
