"""Regrouping: synchronous workers continue without a failed worker, or with a new one.

    worker, in an exchange                      coordinator (worker 0)
      a member fails                              one fails, or a worker reports it, or a replacement waits
      revoke ───────────────────────────────────▶ revoke ──────────▶ all others: their pending operations fail
      StepBroken(view, report on the log) ──────▶ waits for this message from all present workers; `form`
      ◀──────────── membership view(workers, gives, hands, begins)
      a worker with the state ─▶ one that lacks it: parameters, the state of its part, its log
      a worker with a result ──▶ one that lacks it
      all: sums over the new communicator; the exchange continues, or has its result

After Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication capability",
IJHPCA 2013 (revoke, shrink, agree), with the coordinator instead of the agreement: if it fails, its replacement
queries all workers again.

A membership view is the set of workers that train together. Their exchanges are entries of a log (see
`communication.log`), so the result of an exchange is held by some worker, which sends it on, or by none, and the
exchange is repeated. Where contributions are kept, that costs nothing, and the coordinator admits replacements at its
own exchanges; elsewhere it does so before a step. The coordinator may fail like any other worker: its knowledge of
earlier views travels in each view, so any member of the latest view can pass it to the replacement.

A worker other than the coordinator requests the next view from the coordinator, or from its replacement:

worker                          coordinator   its replacement
  StepBroken ────────────────────▶ fails
  waits: no message of the old one is answered
  ◀─────────────────────────────────── EnterLeader
  StepBroken, with the broken view ────────▶ collects the pending members

Where groups regroup independently (`GroupRegroup`), the first server makes the views of each group in the same way,
from the same messages, and other groups are not involved.

The coordinator (`RegroupCoordinator`) makes the next view when all present workers have answered:

    worker interrupts a step    ─▶ StepBroken(view, report)   ─┐
    replacement of a failed one ─▶ EnterWorker ────────────────┼─▶ pending members: all have answered ─▶ view
    worker has failed or left ─────────────────────────────────┘

It does not wait for workers that have left or are about to leave. But a coordinator that has just started has no state,
and at the end of a run all workers with the state may be about to leave: so workers that only wait for permission to
leave take part once more. Such a coordinator knows no view either. All messages that it receives are addressed to it,
so each is of the latest view in which its sender took part; the highest number is the current view.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.control_message import VIEW_TAG, ControlMessage, MembershipView, StepBroken
from polyrhythm.communication.log import NO_STATE, Report, Result, form
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.member_collectives import UNKNOWN_RANK
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.roles.control_messages import EnterLeader, Handover, RegroupAt
from polyrhythm.roles.ledger import Attendance
from polyrhythm.roles.tree_of_members import pays
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.parameter_server.groups.group_server import Dismissal, SomeoneWaits
from polyrhythm.strategies.state import below, prefixed, without
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Logged
from polyrhythm.training.flat_parameters import FlatParameters

NEVER = 1 << 62
"""Step that no worker reaches."""
_MOST_ATTEMPTS = 100
_FIRST = 0
"""Rank in each view's communicator of the member that forwards revocations, and that admits replacements."""
_LOG = "log."


class RegroupControl(Protocol):
    """Control plane as seen by regrouping: the coordinator makes views, other workers request them."""

    def wait_with(self, regroup: Regroup) -> None:
        """Set the object that regroups this worker while it waits for others in the control plane."""

    def await_leader(self, loss: PeerLost) -> bool:
        """Wait for a new coordinator if it was the failed rank; return whether the run survives that."""

    def call_due(self, number: int, step: int, *, wait: bool, repairs: bool = True) -> bool:
        """Whether this worker must regroup before a step, since another waits for a view or needs another state.

        Args:
            number: number of the current view.
            step: number of the step.
            wait: whether regrouping may be postponed by one step.
            repairs: whether members may receive another state now.
        """

    def next_view(self, word: StepBroken) -> MembershipView:
        """Wait for the next view, made once all present workers have reported their progress.

        Args:
            word: progress of this worker.

        Raises:
            PeerLost: a rank that the run needs has failed.
        """


@dataclass(frozen=True)
class _Copy:
    """Copy of a worker's state between two steps.

    Attributes:
        step: steps done.
        vector: `(size,)`, its parameters.
        tensors: tensors of its strategy part's state; see `Logged.to_enter_with`.
        facts: the other part of that state, as JSON.
    """

    step: int
    vector: Tensor
    tensors: dict[str, Tensor]
    facts: str


@dataclass(frozen=True)
class Participant:
    """State and callbacks that a worker brings into a view.

    Attributes:
        worker: index of the worker.
        part: worker part of the strategy, with its log of exchanges.
        flat: parameters and gradients of the worker.
        takes_place: callback after each view, with the absent workers, the index of this worker among the members, and
            their number; it distributes the data.
    """

    worker: int
    part: Logged
    flat: FlatParameters
    takes_place: Callable[[tuple[int, ...], int, int], None]


class Regroup:
    """Moves one worker from view to view: a view is the set of workers that train together.

    Args:
        world: context of this rank.
        control: source of the views.
        member: state and callbacks of the worker.
        everyone: indices of all workers that regroup together.

    Attributes:
        step: steps done by this worker; kept by its loop.
        over: whether this worker has done all its steps.
        repeats_from: first step that this worker can take again.
    """

    def __init__(
        self, world: World, control: RegroupControl, member: Participant, everyone: Sequence[int]
    ) -> None:
        self.step = NO_STATE
        self.over = False
        self._world = world
        self._control = control
        self._member = member
        self._part, self._exchanger = member.part, member.part.exchanger
        self._workers = self._exchanger.workers
        self._everyone = tuple(everyone)
        self._view: MembershipView | None = None
        self.repeats_from = NEVER
        self._agreed_state: _Copy | None = None
        self._latest_state: _Copy | None = None
        self._returned_to: _Copy | None = None
        self._returns = False
        self._attempts = 0
        self._agreed = False
        """Whether the coordinator requested this regrouping, and so revokes the communicator itself."""
        self._enters = False
        """Whether this worker has received a state, and takes part in no exchange of the others yet."""
        self._ended: PeerLost | None = None
        """Failure that ended a regrouping, possibly inside an exchange."""
        self._exchanger.recover, self._exchanger.calls = self.reform, self._calls
        self._exchanger.recovers_from = self.recovers_from
        if not world.rejoins:  # else this communicator is out of use
            self._workers.revoke_without(_FIRST)  # the first member would have forwarded a revocation

    @property
    def leader(self) -> int:
        """Generation of the coordinator that made the current view: number of its predecessors."""
        return 0 if self._view is None else self._view.leader

    @property
    def number(self) -> int:
        """Number of the current view, from 0."""
        return 0 if self._view is None else self._view.number

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the workers of the current view."""
        return self._everyone if self._view is None else self._view.workers

    @property
    def lost(self) -> dict[int, int]:
        """First step without effect of each worker that has failed, by its index; of the latest failure."""
        view = self._view
        if view is None:
            return {}
        return {worker: first for (_, worker), (first, _) in zip(view.missed, view.since, strict=True)}

    @property
    def worker(self) -> int:
        """Index of this worker."""
        return self._member.worker

    def gathers(self, step: int) -> bool:
        """Return whether messages to the coordinator after a step travel along the tree of the members.

        In a new view some may have sent theirs in the view before, or have received their state after this step.
        """
        settled = self._view is None or step >= self._view.step + 2
        return settled and pays(len(self.members))

    @property
    def workers(self) -> Communicator:
        """Communicator of the workers of the current view."""
        return self._workers

    def check(self, step: int) -> None:
        """Record that a step is done; raise if a waiting worker must be admitted before the next one.

        Args:
            step: number of the next step.

        Raises:
            PeerLost: a worker waits.
        """
        self._attempts = 0
        if self._exchanger.admits_between and self._call_due(step, wait=True):
            self._agreed = self._workers.rank != _FIRST
            raise PeerLost(self._world.network.rank, "admitting a worker")

    def note_state(self, step: int) -> None:
        """Copy the state of the coordinator where only two members remain, since neither is a majority.

        Args:
            step: steps done.
        """
        if self._workers.rank == _FIRST and self._workers.size == 2:
            tensors, facts = self._part.to_enter_with()
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            self._latest_state = _Copy(step, self._member.flat.vector.clone(), copies, json.dumps(facts))

    def state_agrees(self, step: int) -> None:
        """Note that all members held the same state after a step."""
        if self._latest_state is not None and self._latest_state.step == step:
            self._agreed_state = self._latest_state

    def return_to_agreed(self) -> int | None:
        """Return to the copy of the latest state that agreed when the next view is made; at most once to the same one.

        Returns:
            The number of steps done in that state; None: there is no such copy.
        """
        copy = self._agreed_state
        if copy is None or copy is self._returned_to:
            return None
        self._returns, self._returned_to = True, copy
        return copy.step

    def forget_states(self) -> None:
        """Drop the copies of states."""
        self._agreed_state = self._latest_state = None

    def _return(self) -> None:
        """Continue from the copy of the latest state that agreed, and repeat the steps since it as far as possible."""
        copy = self._agreed_state
        assert copy is not None, "the coordinator has looked"
        self._returns = False
        self._exchanger.state_replaced()
        if self._exchanger.repeats:
            self._exchanger.log.give_up()
        self._member.flat.vector.copy_(copy.vector)
        state = {name: tensor.clone() for name, tensor in copy.tensors.items()}, json.loads(copy.facts)
        self._part.enter(state, copy.step)
        self._part.take_part(0)
        if self.repeats_from < self.step:
            self.step = self._exchanger.since = max(copy.step, self.repeats_from)

    def recovers_from(self, loss: PeerLost) -> bool:
        """Whether a failure is not the one that ended a regrouping."""
        return loss is not self._ended

    def _call_due(self, step: int, *, wait: bool) -> bool:
        """Whether this worker must regroup before a step; see `RegroupControl`."""
        pending = self._exchanger.log.under_way
        repairs = pending is None or not pending.aside
        return self._control.call_due(self.number, step, wait=wait, repairs=repairs)

    def reform(self) -> None:
        """Regroup with all present workers until a view holds.

        Raises:
            PeerLost: a rank that the run needs has failed.
            RunError: many attempts failed without a step in between.
        """
        while True:
            self._begin_attempt()
            self._exchanger.break_off()
            if not self._exchanger.keeps and self.step != NO_STATE:
                self.step = self._exchanger.since  # a step with incomplete exchanges is repeated
            if self._settles():
                return

    def enter(self) -> None:
        """Enter a view for the first time, as a replacement that has requested it, or as the coordinator.

        Raises:
            PeerLost: a rank that the run needs has failed.
        """
        if not self._settles():
            self.reform()

    def _settles(self) -> bool:
        """Request the next view, and take part in it; return False if another member fails during that."""
        view = self._next_view()
        if view is not None:
            try:
                self._take_place(view)
            except PeerLost as loss:
                if not self.recovers_from(loss):
                    raise
                return False
            self._take_part()
        return True

    def _begin_attempt(self) -> None:
        """Make all other workers leave the operation in which they wait."""
        self._attempts += 1
        if self._attempts > _MOST_ATTEMPTS:
            raise RunError(f"workers have regrouped {_MOST_ATTEMPTS} times without completing a step")
        if not self._agreed:
            self._workers.revoke()
        self._agreed = False

    def _take_part(self) -> None:
        """Take part in the pending exchange of the others, if this worker has just received a state."""
        joins, self._exchanger.joins = self._exchanger.joins, 0
        if self._enters:
            self._enters = False
            self._part.take_part(joins)
        if joins > 0:
            self._exchanger.rows([0] * joins)

    def _next_view(self) -> MembershipView | None:
        """Request the next view; None if training is complete, and this worker only has to leave."""
        if self._returns:
            self._return()
        try:
            return self._control.next_view(self._word)
        except PeerLost as loss:
            self._ended = loss
            raise

    def _calls(self) -> bool:
        """Whether this worker is the first of its view, and a replacement waits to join at an exchange."""
        return (
            not self._exchanger.admits_between
            and self._workers.rank == _FIRST
            and self._call_due(self.step, wait=False)
        )

    @property
    def _word(self) -> StepBroken:
        report, log = Report(), self._exchanger.log
        if self.step != NO_STATE:
            report = Report(
                steps=self.step,
                merged=log.merged,
                opened=log.opened,
                since=self._exchanger.since,
                have=tuple(log.kept),
                apart=log.apart,
                group=self._part.group,
                inside=log.under_way is not None and not log.under_way.aside,
                over=self.over,
            )
        generation = self._world.generation
        return StepBroken(number=self.number, report=report, generation=generation, view=self._view)

    def _take_place(self, view: MembershipView) -> None:
        member, workers = self._member, view.workers
        worker, flat = member.worker, member.flat
        observer, rank = self._world.observer, self._world.network.rank
        if view.workers != self.members:  # copies are kept for the same two members only
            self.forget_states()
        self._view = view
        ranks = [self._world.roles.workers[each] for each in workers]
        self._workers = self._world.network.regrouped(self._name(view), ranks, view.generations)
        self._workers.revoke_without(_FIRST)
        for giver, taker in view.gives:
            if worker == giver:
                self._workers.send(workers.index(taker), self._handover())
            elif worker == taker:
                self._take_state(self._workers.receive(workers.index(giver))[1])
                if observer is not None:
                    observer.caught_up(rank, self.step)
        for number, giver, taker in view.hands:
            if worker == giver:
                self._give_result(number, workers.index(taker))
            elif worker == taker:
                self._take_result(number, workers.index(giver))
        self._exchanger.begins, self._exchanger.finished = view.begins, view.over
        flat.renew_gradients()  # the library may still write into the old ones
        if observer is not None:
            observer.joined(rank, dict(zip(ranks, view.generations, strict=True)), self._name(view))
        first = self._everyone[0]
        self._exchanger.over(self._workers, tuple(each - first for each in workers))
        self._begins_with(view)
        absent = tuple(each for each in self._everyone if each not in workers)
        member.takes_place(absent, workers.index(worker), len(workers))

    def _name(self, view: MembershipView) -> str:
        """Return the name of a view's communicator; two coordinators may make views of the same number."""
        return f"workers {view.number} of {view.leader}"

    def _begins_with(self, view: MembershipView) -> None:
        """Note that the members of a view have agreed, and that their exchanges begin."""
        if self._world.observer is not None and not view.over:
            self._world.observer.regrouped(self._world.network.rank, self._member.flat.vector)

    def _handover(self) -> Message:
        tensors, facts = self._part.to_enter_with()
        kept, noted = self._exchanger.state()
        part = tensors | prefixed(_LOG, kept)
        place = {"step": self.step, "over": self.over}
        return Handover(self._member.flat.vector, part, {"part": facts, "log": noted, **place}).message()

    def _take_state(self, message: Message) -> None:
        given = Handover.from_message(message)
        self._member.flat.vector.copy_(given.vector)
        self._exchanger.load_state(below(_LOG, given.part), given.part_facts["log"])
        self.step, self.over, self._enters = given.part_facts["step"], given.part_facts["over"], True
        self._part.enter((without(_LOG, given.part), given.part_facts["part"]), self.step)

    def _give_result(self, number: int, taker: int) -> None:
        result = self._exchanger.log.kept[number]
        self._workers.send(taker, Message(Kind.VECTOR, result.vector, weight=result.weight, stop=result.stop))

    def _take_result(self, number: int, giver: int) -> None:
        message = self._workers.receive(giver)[1]
        vector = None if message.tensor is None else message.tensor.clone()
        self._exchanger.take(number, Result(vector, message.weight, message.stop))


class GroupRegroup(Regroup):
    """Moves one worker from view to view of its group; the first server makes the views.

    Args:
        world: context of this rank.
        control: control plane of this worker.
        member: state and callbacks of the worker.
        everyone: indices of the group's workers.
        faults: fault policy of the strategy, with independent groups.
    """

    def __init__(
        self,
        world: World,
        control: RegroupControl,
        member: Participant,
        everyone: Sequence[int],
        faults: FaultPolicy,
    ) -> None:
        super().__init__(world, control, member, everyone)
        self._faults = faults
        self._losses: dict[int, int] = {}
        self._server = world.roles.servers[0]

    @property
    def due(self) -> bool:
        """Whether a member of the current view has failed, so that the others may wait for this worker."""
        view = self._view
        there = {} if view is None else dict(zip(view.workers, view.generations, strict=True))
        return not self.over and any(
            view is None or there.get(worker, lost) < lost for worker, lost in self._losses.items()
        )

    def lose(self, worker: int, losses: int) -> None:
        """Record that a worker of the same group has failed while this one waits elsewhere for others.

        Args:
            worker: index of the failed worker.
            losses: number of processes of its rank that have failed.
        """
        self._losses[worker] = losses

    def recovers_from(self, loss: PeerLost) -> bool:
        """Whether a worker has failed and the run survives that; failures of servers are handled elsewhere."""
        if loss.rank in (UNKNOWN_RANK, self._world.network.rank):
            return True
        workers = self._world.roles.workers
        return loss.rank in workers and self._world.continues_without(loss.rank, self._faults)

    def _call_due(self, step: int, *, wait: bool) -> bool:
        while self._workers.rank == _FIRST and (word := self._world.network.poll(self._server, VIEW_TAG)):
            if SomeoneWaits.from_message(word[1]).number == self.number:
                return True
        return False

    def _next_view(self) -> MembershipView | None:
        network = self._world.network
        network.send(self._server, replace(self._word, view=None).message())
        while True:
            word = network.receive(self._server, VIEW_TAG)[1]
            if word.kind is MembershipView.KIND:
                return MembershipView.from_message(word)
            if word.kind is Dismissal.KIND:
                self._end(Dismissal.from_message(word))
                return None

    def _end(self, word: Dismissal) -> None:
        """Leave: the servers have all contributions of the group, or all workers stop."""
        report, total = self._word.report, self._part.total
        own = not report.fresh and self._exchanger.keeps
        step = report.steps + report.inside if own else word.steps
        self.step = step if total is None else min(step, total)
        self.over = self._exchanger.ended = True
        rank, observer = self._world.network.rank, self._world.observer
        if observer is not None:
            observer.joined(rank, {rank: self._world.generation}, f"{self._everyone[0]} over")
            observer.regrouped(rank, self._member.flat.vector, self.step)

    def _name(self, view: MembershipView) -> str:
        return f"replicas {self._everyone[0]}, {view.number}"

    def _begins_with(self, view: MembershipView) -> None:
        if not self._exchanger.keeps or self.step == NO_STATE:
            self.step = self._exchanger.since
        if self._world.observer is not None:
            rank, vector = self._world.network.rank, self._member.flat.vector
            self._world.observer.regrouped(rank, vector, self.step)


class LeaderMessages(Protocol):
    """Messages of the coordinator as needed for making views.

    Attributes:
        attendance: attendance of the workers.
    """

    attendance: Attendance

    def read(self) -> None:
        """Handle the messages that have arrived, without waiting."""

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Handle messages as they arrive, until `enough` returns true."""

    def is_final(self, worker: int) -> bool:
        """Whether a worker has sent its final state."""

    def send_to_worker(self, worker: int, message: ControlMessage) -> None:
        """Send a worker a message, unless it has failed."""


class RegroupCoordinator:
    """Makes views on the coordinator, for all workers.

    Args:
        world: context of this rank.
        strategy: strategy; its fault policy determines whether workers read the coordinator's messages between steps.
        messages: messages between the coordinator and the workers.

    Attributes:
        pending: members that wait for the next view.
        left: workers that have left in good order.
    """

    def __init__(self, world: World, strategy: Strategy, messages: LeaderMessages) -> None:
        self._generation = world.generation
        self._calls = world.continues_without(LEADER, strategy.faults(len(world.roles.workers)))
        self._called: int | None = None
        self._messages = messages
        self.pending = PendingMembers(len(world.roles.workers), world.generation)
        self.left: set[int] = set()

    def call_due(self, number: int, step: int, *, wait: bool, repairs: bool = True) -> bool:
        """Whether a worker is admitted or receives another state before this step; all are notified a step ahead."""
        self._messages.read()
        if self.pending.broken_off:
            return True
        if self._called is None and (self.pending.due or (repairs and self.pending.repairs)):
            self._called = step
            if wait and self._calls:
                self._called += 1
                for worker in self._staying() - {LEADER}:
                    self._messages.send_to_worker(worker, RegroupAt(number, self._called))
        return self._called is not None and step >= self._called

    def next_view(self, word: StepBroken) -> MembershipView:
        """Wait until all present workers have interrupted their step, joined or left; send the members the new view."""
        self._called = None
        awaited, called = self._staying, set[int]()
        if word.fresh:
            awaited = self._there

        def complete() -> bool:
            if word.fresh and self.pending.called:
                called.update(self._call_back(but=called))
            return self.pending.complete(awaited())

        self._messages.read_until(complete)
        view = self.pending.form(word.report, awaited())
        for worker in view.workers:
            if worker != LEADER:
                self._messages.send_to_worker(worker, view)
        return view

    def _staying(self) -> set[int]:
        """Return present workers that have not announced their departure."""
        present = self._messages.attendance.present
        return {worker for worker in present if not self._messages.is_final(worker)}

    def _there(self) -> set[int]:
        return self._messages.attendance.present - self.left

    def _call_back(self, but: set[int]) -> set[int]:
        """Call workers that finished this coordinator's last view and only wait for permission to leave."""
        through = {
            worker
            for worker in self.pending.view.workers
            if worker not in but and self._messages.is_final(worker) and not self.pending.waits(worker)
        }
        for worker in through:
            self._messages.send_to_worker(worker, EnterLeader(self._generation))
        return through


class NoWorkersLeft(PeerLost):
    """All ranks that held the run's parameters have failed."""

    def __init__(self) -> None:
        super().__init__(LEADER, "collecting the workers")
        self.args = ("all workers with the parameters have failed, including worker 0",)


class PendingMembers:
    """Collects the members that wait for the next view, and makes it.

    Args:
        workers: initial number of workers.
        generation: number of previous coordinators.

    Attributes:
        view: current view.
        called: whether the current view was made by this coordinator.
        repairs: members that receive the state of another member in the next view.
    """

    def __init__(self, workers: int, generation: int = 0) -> None:
        self.view = MembershipView(number=0, workers=tuple(range(workers)))
        self.called = False
        self.repairs: set[int] = set()
        self._everyone = frozenset(range(workers))
        self._waiting: dict[int, Report] = {}
        self._generations = {LEADER: generation}

    @property
    def due(self) -> bool:
        """Whether any member waits."""
        return bool(self._waiting)

    @property
    def broken_off(self) -> bool:
        """Whether a waiting member was taking steps."""
        return not all(report.fresh for report in self._waiting.values())

    def on_message(self, worker: int, word: StepBroken) -> None:
        """Record that a worker has interrupted a step; its reports of earlier views are ignored from now on."""
        if word.view is not None and word.number > self.view.number:
            self.view = word.view
        elif word.number < self.view.number and self.called and not word.fresh:
            return
        self._waiting[worker] = word.report
        self._generations[worker] = word.generation

    def enter(self, worker: int, generation: int) -> None:
        """Record that a replacement requests admission."""
        self._waiting[worker] = Report()
        self._generations[worker] = generation

    def lose(self, worker: int) -> None:
        """Remove a failed worker."""
        self._waiting.pop(worker, None)

    def waits(self, worker: int) -> bool:
        """Whether a worker waits."""
        return worker in self._waiting

    def complete(self, awaited: Collection[int]) -> bool:
        """Whether all `awaited` workers wait; the coordinator sends itself no message."""
        return all(worker in self._waiting for worker in awaited if worker != LEADER)

    def form(self, leader: Report, awaited: Collection[int]) -> MembershipView:
        """Make the next view of the coordinator and the waiting members.

        Args:
            leader: report of the coordinator.
            awaited: present workers that have not left.

        Raises:
            NoWorkersLeft: no worker has a state to continue from.
        """
        reports = {worker: self._waiting.get(worker, Report()) for worker in awaited} | {LEADER: leader}
        if any(not report.fresh and worker not in self.repairs for worker, report in reports.items()):
            reports |= {worker: Report() for worker in self.repairs & reports.keys()}
        self.repairs = set()
        formed = form(reports)
        if formed is None:
            raise NoWorkersLeft
        most = reports[formed.newest]
        lost = [(most.since, most.steps + most.inside) for _ in self._gone(formed.members)]
        return self._next(
            formed.members,
            step=most.steps,
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
        """Return members of the previous view that are absent or replaced."""
        before = dict(zip(self.view.workers, self.view.generations, strict=False))
        return [
            worker
            for worker in self.view.workers
            if worker not in workers or self._generations.get(worker, 0) != before.get(worker, 0)
        ]
