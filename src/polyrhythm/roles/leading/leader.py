"""The coordinator: the control plane of worker 0, which trains like any other worker and receives from all ranks.

It receives events, states and final reports; it sends losses, replacements and permissions to leave. Its other work
for the run (tests, checkpoints, metrics) is in its `Duties`. `WorkerStates` holds the workers' latest
states, and announces failed workers and replacements. `ServerReports` requests the states of shards and the
final reports from servers. `Neighbors` lists the workers in lockstep with each other where groups regroup apart,
which a waiting coordinator must notify of a failure. `EventEmitter` emits the coordinator's own events.
`Introductions` is the list of workers of a new coordinator, from their own messages:

worker    ── Introduction, its latest state ─▶ new coordinator  was present before
newcomer  ── EnterWorker ─▶ waits for admission, until some worker has sent the coordinator its untrained tensors

`Stragglers` names workers with much longer steps of their own than the others':

    own time of a step = (time between two reports - waiting - pauses) / steps,   over the last `WINDOW_S` seconds
    straggler          = own time > median * (1 + max(EXCESS, SPREAD / sqrt(steps)))

The second term prevents random step times with a spread as large as their mean from counting as slowness.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import sqrt
from statistics import median_low
from typing import Any, NamedTuple

from torch import Tensor

from polyrhythm.communication.control_message import ControlMessage, MembershipView, StepBroken
from polyrhythm.communication.message import Kind, MalformedMessage, Message, unpack_json
from polyrhythm.data.dealing import Begun
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.events import (
    Event,
    ServerJoined,
    ServerLost,
    StateDiffers,
    Straggler,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import (
    Account,
    EnterLeader,
    EnterWorker,
    EventReport,
    FinalModel,
    Introduction,
    MayLeave,
    ServerReady,
    ShardState,
    ShardStateRequest,
    StateDigests,
    StatesGathered,
    StepsCounted,
    TakenBatches,
    Welcome,
)
from polyrhythm.roles.control_plane import Boundary, ControlPlane, Entry, EvaluatesPart
from polyrhythm.roles.deal import Deal
from polyrhythm.roles.digests import DigestComparison
from polyrhythm.roles.ledger import Attendance, Ledger, ServerAttendance, ServerLosses
from polyrhythm.roles.member import load_untrained, share_untrained
from polyrhythm.roles.regroup import GroupRegroup, Regroup, RegroupCoordinator
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.fault_policy import FaultPolicy, Rejoin
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy, Traits


class Duties:
    """Work of worker 0 for the run as its coordinator: training, a dry run and a user's own loop each have theirs.

    Attributes:
        leader: coordinator that has these duties.
        deal: source of the workers' batches; None where they have fixed shares.
        dry: whether this is a dry run: replacements receive no state, and workers hand in accounts instead of states.
        begun: progress of other numbers of workers in unfinished epochs.
        elapsed_s: seconds since training started.
        paused_s: seconds that the coordinator spent outside of training, on tests and checkpoints.
    """

    leader: Leader
    deal: Deal | None = None
    dry = False

    def attach(self, leader: Leader) -> None:
        """Attach the duties to a coordinator that has just been made."""
        self.leader = leader

    @property
    def begun(self) -> Begun:
        """Progress of other numbers of workers in unfinished epochs."""
        return Begun()

    @property
    def elapsed_s(self) -> float:
        """Seconds since training started."""
        return 0.0

    @property
    def paused_s(self) -> float:
        """Seconds that the coordinator spent outside of training."""
        return 0.0

    def emit(self, event: Event) -> None:
        """Emit an event of the coordinator's own, with no time set: a loss, or a replacement."""
        raise NotImplementedError

    def restore(self) -> WorkerState | None:
        """Distribute the newest checkpoint, if the run resumes from one; return worker 0's part of it."""
        return None

    def take_up(self) -> None:
        """Prepare this worker, a replacement, which is about to announce itself as coordinator."""

    def inherit(self) -> None:
        """Continue after it has announced itself and received the untrained tensors."""

    def begin(self, epoch: int) -> None:
        """Note that training starts."""

    def after_step(self) -> None:
        """Handle the end of a step; must not wait."""

    def state_due(self, done: int, epochs: int) -> bool:
        """Return whether a checkpoint is due; see `ControlPlane.state_due`."""
        return False

    def state_received(self, state: WorkerState) -> None:
        """Record that a worker has sent its state."""

    def boundary(
        self,
        why: Boundary,
        record: WorkerState,
        epochs: int,
        presented: Tensor | None,
        test: EvaluatesPart | None = None,
    ) -> None:
        """Test and save, where the duties are to do so; see `ControlPlane.boundary`."""

    def end(self) -> FinalModel | None:
        """Release the servers and then the workers, once all workers have handed in their last states."""
        raise NotImplementedError

    def defers(self, rank: int, generation: int) -> bool:
        """Whether the duties keep a replacement waiting that asks to take part; see `Leader.admit`."""
        return False

    def regrouping(self, number: int) -> None:
        """Prepare to wait for all workers, since this view has broken."""

    def took(self, worker: int, batches: TakenBatches) -> None:
        """Record that a worker has taken batches of its share."""

    def server_ready(self, rank: int, generation: int) -> None:
        """Note that the replacement of a failed server has all of its shards."""


class Leader(ControlPlane):
    """The control plane of rank 0; see `ControlPlane`.

    Where the run survives the failure of a worker, a failed one is not awaited, and its replacement is admitted.

    Args:
        world: context of this rank.
        strategy: strategy; its fault policy decides which failures the run survives.
        duties: further work of the coordinator.
        ledger: record of the run so far, which a replacement of the coordinator takes over.
        replica: replica of this worker; None in a dry run, or where a user makes it later.

    Attributes:
        replica: the given replica, or the one set before `enter`.
        attendance: attendance of the workers.
        workers: latest state of each worker.
        servers: reports and states of the servers.
        views: maker of the workers' views.
        introductions: introductions of the ranks to a new coordinator.
        differences: number of comparisons in which members had different parameters or optimizer states.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        duties: Duties,
        ledger: Ledger,
        replica: Replica | None = None,
    ) -> None:
        workers = len(world.roles.workers)
        self.replica = replica
        self._world = world
        traits, faults = strategy.traits(workers), strategy.faults(workers)
        self._strategy = strategy
        self._faults = faults
        self._duties = duties
        self._dry = duties.dry
        self._control = world.control()
        self.attendance = ledger.attendance
        self.workers = WorkerStates(world.roles.workers, ledger.attendance, duties.emit)
        self.servers = ServerReports(world, faults, ledger.servers, duties.emit, self.read_until)
        self.views = RegroupCoordinator(world, strategy, self)
        self.introductions = Introductions()
        self._comparison = DigestComparison()
        self.differences = 0
        self._gathered: dict[int, int] = {}
        """Steps of each worker when its messages were last gathered."""
        self._behind: set[int] = set()
        self._regroups = faults.regroups
        self._regroup: Regroup | None = None
        self._group: GroupRegroup | None = None
        self._neighbors = Neighbors(traits, faults)
        self._meets = traits.lockstep
        self._reads_each_step = faults.continues and not duties.dry
        self._leaves_behind = faults.rejoin is Rejoin.BEHIND
        # Neighbors of worker 0 take steps by themselves, and then wait for it; so does a newcomer.
        self._group_in_rounds = faults.regroups_apart and traits.exchange_every != 1
        self._meets_rarely = self._leaves_behind and traits.exchange_every != 1
        self._unheard: set[int] = set()
        """Workers that may wait for this new coordinator in a round before its announcement has reached them."""
        # By worker: its failures, and those of them for which servers have reported the steps that count.
        self._struck_off: Counter[int] = Counter()
        self._counted: Counter[int] = Counter()
        self._counts: dict[tuple[int, int], dict[int, int]] = {}
        """The steps that count, by worker and losses, as each server reports them, until all have."""
        self._has_leaves = traits.leaves > 0
        self._newer_servers: set[int] = set()
        duties.attach(self)

    # Requests of a worker to the control plane.

    def wait_with(self, regroup: Regroup) -> None:
        """Set what regroups all workers, or worker 0's group, while this worker waits for states."""
        if isinstance(regroup, GroupRegroup):
            self._group = regroup
        else:
            self._regroup = regroup

    def await_leader(self, loss: PeerLost) -> bool:
        return False

    def call_due(self, number: int, step: int, *, wait: bool, repairs: bool = True) -> bool:
        """Whether a worker is admitted, or receives another's state, before this step or before the next."""
        return self.views.call_due(number, step, wait=wait, repairs=repairs)

    def next_view(self, word: StepBroken) -> MembershipView:
        self._duties.regrouping(word.number)
        return self.views.next_view(word)

    def enter(self) -> Entry:
        if self._world.rejoins:
            self._duties.take_up()
            self._take_over()
            self._inherit_untrained()
            self._duties.inherit()
            self._open_deal()
            return Entry(elapsed_s=self._duties.elapsed_s, begun=self._duties.begun)
        if self.replica is not None:
            share_untrained(self._world, self._strategy, self.replica)
        restored = self._duties.restore()
        self._open_deal()
        return Entry(restored, begun=self._duties.begun)

    def begin(self, epoch: int) -> None:
        self._duties.begin(epoch)
        if self.deal is not None:
            self.deal.begin()
            if self._world.rejoins and not self._world.roles.servers:
                # It has drawn batches that its predecessor had not done, unless it counts its steps otherwise.
                losses = self.attendance.losses(LEADER)
                self._return_batches(LEADER, self.attendance.last_step(LEADER), losses)

    def after_step(self) -> None:
        """Admit replacements, which wait for an answer."""
        self._duties.after_step()
        if self._reads_each_step:
            self.read()

    def state_due(self, done: int, epochs: int = 0) -> bool:
        return self._duties.state_due(done, epochs)

    def report(self, fact: Event | TakenBatches | StateDigests, *, before_state: bool = False) -> None:
        if isinstance(fact, TakenBatches):
            self._duties.took(LEADER, fact)
            return
        if isinstance(fact, StateDigests):
            self._compare(fact)
            return
        self._pass_on(fact, self._duties.paused_s)
        self.read()

    def boundary(
        self,
        why: Boundary,
        record: WorkerState,
        epochs: int = 0,
        presented: Tensor | None = None,
        test: EvaluatesPart | None = None,
        *,
        together: bool = False,
    ) -> None:
        self.workers.take(record)
        self._duties.boundary(why, record, epochs, presented, test)

    def work_done(self, record: WorkerState) -> bool:
        if self._dry:  # others hand nothing in before they leave
            return True
        assert self.deal is not None, "only workers with dynamic batches ask"
        self.workers.take(record)
        self.wait_for_work_done()
        while any(losses > self._counted[worker] for worker, losses in self._struck_off.items()):
            self._receive_or_regroup()
            self.wait_for_work_done()
        return not self.deal.undealt

    def attend(self) -> bool:
        self.read()
        return self._regroup is not None and self.views.pending.due

    def leave(self, record: WorkerState) -> FinalModel | None:
        self.workers.take(record)
        self._wait_for_all_final()
        found = self._duties.end()
        if self.deal is not None:
            self.deal.close()
        return found

    @property
    def difference_figures(self) -> dict[str, int]:
        """Number of differences as a figure of the run's result, if there were any."""
        return {"states_differed": self.differences} if self.differences else {}

    @property
    def deal(self) -> Deal | None:
        """Source of the workers' batches; None where they have fixed shares."""
        return self._duties.deal

    def _open_deal(self) -> None:
        if (deal := self.deal) is not None:
            for worker in range(len(self._world.roles.workers)):
                losses = self.attendance.losses(worker)
                if worker not in self.attendance.present:
                    self._return_batches(worker, self.attendance.last_step(worker), losses)
                elif self._world.rejoins and worker != LEADER:
                    deal.inherit(worker, losses)
            deal.open()

    def _return_batches(self, worker: int, step: int, losses: int, *, reported: bool = True) -> None:
        if self.deal is not None:
            self.deal.lose(worker, step, losses, reported=reported)

    # Requests of the duties to the coordinator.

    def send_states(
        self, workers: dict[int, WorkerState], servers: list[State], behind: Collection[int] = ()
    ) -> None:
        """Send every other rank the state that it resumes from.

        Args:
            workers: state of every other worker.
            servers: state of every shard.
            behind: workers that have done fewer steps than the coordinator.
        """
        self._behind.update(behind)
        for server, rank in enumerate(self._world.roles.servers):
            for shard in self._faults.shards_of(server):
                self._control.send(rank, ShardState(shard, *servers[shard]).message())
        for worker, state in workers.items():
            self._send(self._world.roles.workers[worker], state)

    def admit(self, rank: int, generation: int) -> None:
        """Admit a replacement of a failed worker; where workers regroup, it waits for the next view."""
        worker = self._world.roles.workers.index(rank)
        self._see(worker, generation)
        self.views.left.discard(worker)  # it was killed before this coordinator had released it
        self.workers.forget(worker)
        if not self._dry:
            duties, untrained = self._duties, {} if self.replica is None else self.replica.untrained
            self._send(rank, Welcome(untrained, duties.elapsed_s, duties.begun.to_json()))
        if self._regroups:
            self.views.pending.enter(worker, generation)
        else:
            self._behind.add(worker)

    def await_introductions(self) -> None:
        """Wait until all workers have introduced themselves to this new leader, and sent their latest state again."""
        self.read_until(lambda: self.introductions.complete(self.attendance.present, self.workers.states))

    def dismiss(self) -> None:
        """Permit workers to leave that have sent their final state; until now they kept it for a new coordinator."""
        if self._world.continues_without(LEADER, self._faults):
            for worker in self.workers.states:
                if worker != LEADER:
                    self.send_to_worker(worker, MayLeave())

    def wait_for_step(self, step: int) -> None:
        """Wait until every worker has sent its state of this step, or has stopped before it.

        A replacement that is behind, and so may wait for the coordinator, is not awaited.
        """
        self._wait_for_all(lambda account: account.step >= step or account.stopped)

    def wait_for_work_done(self) -> None:
        """Wait until every worker has stopped, or found that there are no more batches to draw."""
        self._wait_for_all(lambda account: account.through or account.stopped)

    def wait_for_stop(self, steps: int) -> None:
        """Wait until every worker has stopped early, or taken all steps; it may not have left yet.

        Args:
            steps: steps that every worker takes.
        """
        self._wait_for_all(lambda account: account.stopped or account.final or account.step >= steps)

    def send_to_worker(self, worker: int, message: ControlMessage) -> None:
        """Send a worker a message, unless it has failed."""
        self._send_if_there(self._world.roles.workers[worker], message.message())

    # Received messages.

    def read(self) -> None:
        """Handle the messages that have arrived, without waiting."""
        while self._receive(self._control.poll):
            pass

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Handle messages as they arrive, until `enough` returns true."""
        while not enough():
            self._receive(self._control.receive)

    def is_final(self, worker: int) -> bool:
        """Whether a worker has sent its final state."""
        return self.workers.is_final(worker)

    def _wait_for_all(self, done: Callable[[Account], bool]) -> None:
        """Wait until `done` holds for every present worker that cannot be waiting for the coordinator; may regroup."""
        states = self.workers.states
        while not all(
            self._may_wait(worker) or (worker in states and done(states[worker].account))
            for worker in self.attendance.present
        ):
            self._receive_or_regroup()

    def _wait_for_all_final(self) -> None:
        final, present = self.workers.final, self.attendance.present
        # Thousands hand in their last states one by one: all are checked only once their number is right.
        while len(final) < len(present) or not present <= final:
            self._receive_or_regroup()

    def _receive_or_regroup(self) -> None:
        if self._regroup is not None and self.views.pending.due:
            self._regroup.reform()
        elif self._group is not None and (self._meets or self._group_in_rounds) and self._group.due:
            self._group.reform()
        else:
            self._receive(self._control.receive)

    def _may_wait(self, worker: int) -> bool:
        """Whether a worker may be waiting for the coordinator's next step, so that waiting for it would deadlock."""
        if worker not in self._behind and worker not in self._unheard:
            return False
        return self._leaves_behind or self._neighbors.beside_leader(worker)

    def _receive(self, get: Callable[[], tuple[int, Message] | None]) -> bool:
        """Handle one message or one loss; return whether there was either."""
        try:
            found = get()
        except PeerLost as loss:
            server = loss.rank in self._world.roles.servers
            through = self.servers.reports if server else map(self._rank, self.workers.final)
            if loss.rank not in through and not self._world.continues_without(loss.rank, self._faults):
                raise
            if server:
                self.servers.lose(loss.rank)
                self._newer_servers.add(loss.rank)
                if not self._counting_servers:  # no server remains that would report the steps that count
                    self._struck_off.clear()
                self._settle_counts()
            else:
                self._strike_off(loss.rank)
            return True
        if found is not None:
            self._take(*found)
        return found is not None

    def _take(self, source: int, message: Message) -> None:
        kind = message.kind
        if kind is Kind.EVENT:
            self._pass_on(EventReport.from_message(message).event)
        elif kind is Kind.RECORD:
            self._receive_state(WorkerState.from_message(message))
        elif kind is Kind.ACCOUNT:
            self._receive_state(WorkerState(Account.from_message(message), {}, {}, {}))
        elif kind is Kind.REPORT or kind is Kind.STATE:
            self.servers.on_message(source, message)
        elif kind is Kind.READY:
            self._duties.server_ready(source, ServerReady.from_message(message).generation)
            self.servers.enter(source)
        elif kind is Kind.JOIN:
            self._ask_to_enter(source, EnterWorker.from_message(message).generation)
        elif kind is Kind.INTRODUCTION:
            self._meet(source, Introduction.from_message(message))
        elif kind is Kind.BROKEN:
            self.views.pending.on_message(self._worker(source), StepBroken.from_message(message))
        elif kind is Kind.COUNTED:
            counted = StepsCounted.from_message(message)
            worker = self._worker(counted.rank)
            if counted.losses > self._counted[worker]:
                self._counts.setdefault((worker, counted.losses), {})[source] = counted.steps
                self._settle_counts()
        elif kind is Kind.DIGEST:
            self._compare(StateDigests.from_message(message))
        elif kind is Kind.GATHERED:
            self._take_gathered(StatesGathered.from_message(message))
        elif kind is Kind.TAKEN:
            self._duties.took(self._worker(source), TakenBatches.from_message(message))
        else:
            raise MalformedMessage(f"rank {source} sent the leader a {kind.name} message")

    def _take_gathered(self, gathered: StatesGathered) -> None:
        """Handle the messages of several workers, but none a second time, and none of failed processes.

        In the last epoch a worker's last state may be there first.
        """
        attendance = self.attendance
        for worker, generation, step, messages in gathered.messages():
            known = worker in attendance.present and attendance.losses(worker) == generation
            if known and step > self._gathered.get(worker, -1):
                self._gathered[worker] = step
                for message in messages:
                    if message.kind is Kind.EVENT or not self.is_final(worker):
                        self._take(self._rank(worker), message)

    def _compare(self, digests: StateDigests) -> None:
        """Record digests; if the members differ, have the next view repair that.

        Raises:
            RunError: nothing shows which member is right, and no state is known that was.
        """
        pending, regroup = self.views.pending, self._regroup
        verdict = self._comparison.add(digests, pending.view.number, pending.view.workers)
        if verdict is None or regroup is None or pending.repairs:
            return
        if not verdict.differing:
            regroup.state_agrees(verdict.step)
            return
        self.differences += 1
        returned_to = None
        pending.repairs.update(verdict.differing)
        if not verdict.majority:
            returned_to = regroup.return_to_agreed()
            pending.repairs.discard(LEADER)
            if returned_to is None:
                raise RunError(
                    f"workers {' and '.join(map(str, verdict.differing))} differ after step {verdict.step}, and "
                    "neither a majority nor a state that agreed shows which is right: memory of a host is damaged. "
                    "Replace a host and resume, or compare nothing (digest_every 0)"
                )
        self._duties.emit(
            StateDiffers(
                time_s=0,
                text=StateDiffers.sentence(verdict.differing, verdict.since, verdict.step, returned_to),
                workers=list(verdict.differing),
                after_step=verdict.since,
                step=verdict.step,
                returned_to=returned_to,
            )
        )

    def _rank(self, worker: int) -> int:
        return self._world.roles.workers[worker]

    def _worker(self, rank: int) -> int:
        return self._world.roles.workers.index(rank)

    def _receive_state(self, state: WorkerState) -> None:
        account = state.account
        self.workers.take(state)
        self._duties.state_received(state)
        if self._dry:
            self.workers.see(account.worker, 0)
        elif self._regroups and account.stopped and account.final:
            self._world.stop.request()  # after a step that the others may have to take again

    def _pass_on(self, event: Event, paused_s: float = 0.0) -> None:
        emit = self._world.emit
        if not isinstance(event, WorkerProgress):
            emit(event)
            return
        if self._dry:  # a replacement announces itself by its first report
            self.workers.see(event.worker, 0)
        self.attendance.note(event)
        emit(event)
        if news := self.workers.stragglers.on_progress(event, paused_s):
            emit(news)

    # Failed workers, and newcomers.

    def _strike_off(self, rank: int) -> None:
        worker = self._worker(rank)
        self.introductions.lose(worker)
        if worker in self.attendance.present and self.is_final(worker):
            self.views.left.add(worker)
        elif worker in self.attendance.present:
            self.views.pending.lose(worker)
            self._lose(worker)
            if self.deal is not None and (self._counting_servers or self._has_leaves):
                self._struck_off[worker] = self.attendance.losses(worker)
            self._behind.update(self._neighbors.held_up_by(worker))  # they cannot finish a step without it
            if self._group is not None and self._neighbors.beside_leader(worker):
                self._group.lose(worker, self.attendance.losses(worker))

    @property
    def _counting_servers(self) -> set[int]:
        """Servers that each report the steps that count of every failed worker.

        A leaf knows only of its own workers, and the replacement of a failed server only of later failures.
        """
        return set() if self._has_leaves else {*self.servers.attendance.present} - self._newer_servers

    def _settle_counts(self) -> None:
        """Return the batches of failed workers once all servers have reported the steps that count: those of all."""
        for (worker, losses), steps in sorted(self._counts.items()):
            if self._counting_servers <= steps.keys():
                del self._counts[worker, losses]
                self._counted[worker] = max(self._counted[worker], losses)
                self._return_batches(worker, min(steps.values()), losses)

    def _lose(self, worker: int) -> None:
        """Remove a failed worker; without servers, its own latest report determines which of its steps count."""
        attendance = self.attendance
        reported = attendance.has_spoken(worker)
        self.workers.lose(worker)
        if not self._world.roles.servers:
            self._return_batches(
                worker, attendance.last_step(worker), attendance.losses(worker), reported=reported
            )

    def _see(self, worker: int, generation: int) -> None:
        """Enter a present worker; its predecessors must have failed."""
        while self.attendance.losses(worker) < generation:
            self._lose(worker)
        self.workers.see(worker, generation)

    def _ask_to_enter(self, rank: int, generation: int) -> None:
        if self._duties.defers(rank, generation):
            return
        if self.introductions.on_newcomer(self._worker(rank), rank, generation):
            self.admit(rank, generation)

    def _meet(self, source: int, message: Introduction) -> None:
        """Record a worker's introduction to this new coordinator."""
        worker = self._worker(source)
        self._unheard.discard(worker)
        self._see(worker, message.generation)
        if message.generation or message.behind:
            self._behind.update({worker, *self._neighbors.held_up_by(worker)})
        self.introductions.on_message(worker, message)

    def _take_over(self) -> None:
        """Announce this rank, a replacement, as the new coordinator; all then send their latest state again."""
        generation = self._world.generation
        self.workers.see(LEADER, generation)
        rarely = self._meets_rarely or self._group_in_rounds
        self._unheard = self.attendance.present - {LEADER} if rarely else set()
        for worker in range(len(self._world.roles.workers)):
            if self.attendance.losses(worker):
                self._behind.update(self._neighbors.held_up_by(worker))
        word = EnterLeader(generation).message()
        for rank in range(self._world.network.size):
            if rank != LEADER:  # in the background, so that a hanging rank does not delay the others
                self._control.start(partial(self._send_if_there, rank, word))

    def _inherit_untrained(self) -> None:
        """Take untrained tensors from the first worker that sends them; replacements, which need them too, wait."""
        if self.replica is None or not self.replica.untrained:
            return
        known, present = self.introductions, self.attendance.present
        known.defer()
        self.read_until(lambda: known.untrained is not None or known.none_left(present))
        if known.untrained is not None:
            load_untrained(self.replica, known.untrained)
        for rank, generation in known.held_back():
            self.admit(rank, generation)

    def _send_if_there(self, rank: int, message: Message) -> None:
        with suppress(PeerLost):  # a receive reports it as well
            self._control.send(rank, message)

    def _send(self, rank: int, message: ControlMessage) -> None:
        try:
            self._control.send(rank, message.message())
        except PeerLost:
            if not self._world.continues_without(rank, self._faults):
                raise


class WorkerStates:
    """Records the workers' latest states, and announces failed workers and replacements.

    Args:
        ranks: ranks of the workers, by their indices.
        attendance: attendance of the workers.
        emit: receiver of the coordinator's own events; it sets their times.

    Attributes:
        states: latest state of every present worker.
        final: workers that have sent their last state.
        stragglers: detector of stragglers among the workers.
    """

    def __init__(self, ranks: tuple[int, ...], attendance: Attendance, emit: Callable[[Event], None]) -> None:
        self.states: dict[int, WorkerState] = {}
        self.final: set[int] = set()
        self.stragglers = Stragglers()
        self._ranks = ranks
        self._attendance = attendance
        self._emit = emit

    @property
    def in_order(self) -> list[WorkerState]:
        """The latest states, in the workers' order."""
        return [self.states[worker] for worker in sorted(self.states)]

    def is_final(self, worker: int) -> bool:
        """Whether a worker has handed in its last state."""
        return worker in self.final

    def take(self, state: WorkerState) -> None:
        """Record a worker's latest state."""
        account = state.account
        self.states[account.worker] = state
        (self.final.add if account.final else self.final.discard)(account.worker)

    def forget(self, worker: int) -> None:
        """Drop the state of a worker that has left or failed."""
        self.states.pop(worker, None)
        self.final.discard(worker)

    def lose(self, worker: int) -> None:
        """Remove a failed worker, and announce it."""
        self.forget(worker)
        step = self._attendance.lose(worker)
        self._emit(WorkerLost(time_s=0, worker=worker, rank=self._ranks[worker], step=step))

    def see(self, worker: int, generation: int) -> None:
        """Enter a present worker, and announce it, unless it is known. Its predecessors must have failed.

        Args:
            worker: index of the worker.
            generation: number of previous processes of its rank.
        """
        while self._attendance.losses(worker) < generation:
            self.lose(worker)
        if worker not in self._attendance.present:
            self._attendance.join(worker)
            self.stragglers.forget(worker)
            self._emit(WorkerJoined(time_s=0, worker=worker, rank=self._ranks[worker]))


class ServerReports:
    """Requests from servers what the coordinator needs, and collects it.

    Args:
        world: context of this rank.
        faults: fault policy: the shards of each server, and the failures that the run survives.
        losses: losses of servers so far.
        emit: emitter of the coordinator's events, which sets their time.
        read_until: function that handles messages until a condition holds.

    Attributes:
        attendance: attendance of the servers.
        reports: final report of every server, by its rank.
    """

    def __init__(
        self,
        world: World,
        faults: FaultPolicy,
        losses: ServerLosses,
        emit: Callable[[Event], None],
        read_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.attendance = ServerAttendance(world.roles.servers, faults, losses)
        self.reports: dict[int, dict[str, Any]] = {}
        self._world = world
        self._emit = emit
        self._read_until = read_until
        self._requests: dict[int, deque[dict[int, State]]] = {}

    def wait(self) -> None:
        """Wait for the final report of every server, sent once it has been released."""
        self._read_until(lambda: all(rank in self.reports for rank in self.attendance.present))

    def ask(self) -> list[State]:
        """Return the state of every shard, requested from the servers that hold it now."""
        found = self.request()
        self._read_until(lambda: self.all_of(found) is not None)
        return [found[shard] for shard in sorted(found)]

    def request(self) -> dict[int, State]:
        """Request the state of every shard; return the states, by shard, which is filled as they arrive."""
        found: dict[int, State] = {}
        for shard in range(len(self._world.roles.servers)):
            self._requests.setdefault(shard, deque()).append(found)
            self._ask_for(shard)
        return found

    def all_of(self, found: dict[int, State]) -> list[State] | None:
        """Return the states of a request, in the order of their shards; None while one is missing."""
        whole = len(found) == len(self._world.roles.servers)
        return [found[shard] for shard in sorted(found)] if whole else None

    def on_message(self, source: int, message: Message) -> None:
        """Record a server's final report, or a shard's state if one was requested."""
        assert message.tensor is not None, "both carry a payload"
        if message.kind is Kind.REPORT:
            self.reports[source] = unpack_json(message.tensor)
            return
        state = ShardState.from_message(message)
        if requests := self._requests.get(state.shard):
            requests.popleft()[state.shard] = state.tensors, state.facts

    def lose(self, rank: int) -> None:
        """Note that a server has failed, unless it had sent its final report; request its missing shards from others.

        Raises:
            PeerLost: no other server holds its shard.
        """
        if rank in self.reports or not self.attendance.lose(rank):
            return
        name = self.attendance.name(rank)
        self._emit(
            ServerLost(
                time_s=0, text=f"{name} is lost; another server with its shard continues with it", rank=rank
            )
        )
        for shard in self.attendance.shards_of(rank):
            for _ in self._requests.get(shard, ()):
                self._ask_for(shard)

    def enter(self, rank: int) -> None:
        """Note that a replacement of a failed server has all of its shards."""
        self.attendance.losses.join(rank)
        text = f"{self.attendance.name(rank)} is there again, and has its shards from its neighbors"
        self._emit(ServerJoined(time_s=0, text=text, rank=rank))

    def _ask_for(self, shard: int) -> None:
        with suppress(PeerLost):  # the other communicator reports it, and other servers are asked
            self._world.network.send(self.attendance.holder(shard), ShardStateRequest(shard).message())


class Introductions:
    """Introductions of the workers to one new coordinator.

    Attributes:
        untrained: untrained tensors by name, from the first worker that sent them.
    """

    def __init__(self) -> None:
        self.untrained: dict[str, Tensor] | None = None
        self._newcomers: set[int] = set()
        self._follows: dict[int, bool] = {}
        self._asking: dict[int, tuple[int, int]] | None = None

    def on_message(self, worker: int, message: Introduction) -> None:
        """Record a worker's introduction, which includes whether a state follows."""
        self._follows[worker] = message.record_follows
        self.untrained = self.untrained or message.untrained

    def on_newcomer(self, worker: int, rank: int, generation: int) -> bool:
        """Note that a newcomer asks for admission; return whether it can be admitted now."""
        self._newcomers.add(worker)
        if self._asking is None:
            return True
        self._asking[worker] = rank, generation
        return False

    def lose(self, worker: int) -> None:
        """Forget a newcomer that has failed."""
        if self._asking is not None:
            self._asking.pop(worker, None)

    def defer(self) -> None:
        """Make newcomers wait from now on."""
        self._asking = {}

    def held_back(self) -> list[tuple[int, int]]:
        """Return waiting newcomers, by rank and generation; from now on they need not wait."""
        asking, self._asking = self._asking or {}, None
        return list(asking.values())

    def none_left(self, present: Collection[int]) -> bool:
        """Whether all other present workers are newcomers."""
        return set(present) <= {LEADER} | self._newcomers

    def complete(self, present: Collection[int], state_received: Collection[int]) -> bool:
        """Whether all present workers have introduced themselves, and their states have arrived.

        Args:
            present: present workers.
            state_received: workers that have sent their states.
        """
        return all(
            worker in self._newcomers
            or not self._follows.get(worker, True)
            or self._has(worker, state_received)
            for worker in present
            if worker != LEADER
        )

    def _has(self, worker: int, state_received: Collection[int]) -> bool:
        return worker in self._follows and worker in state_received


class Neighbors:
    """Groups of a run.

    Args:
        traits: traits of the strategy.
        faults: fault policy of the strategy; where groups do not regroup apart, each worker is a group of its own.
    """

    def __init__(self, traits: Traits, faults: FaultPolicy) -> None:
        groups = traits.groups if faults.regroups_apart else ()
        self._group_of = {worker: group for group in groups for worker in group}

    def beside_leader(self, worker: int) -> bool:
        """Whether a worker, given by its index, is in worker 0's group, which regroups with it."""
        return LEADER in self._group_of.get(worker, ())

    def held_up_by(self, worker: int) -> tuple[int, ...]:
        """Return the workers that may fall behind worker 0 when one, given by its index, is lost."""
        return () if self.beside_leader(worker) else self._group_of.get(worker, ())


class EventEmitter:
    """Emits the coordinator's own events, with their times in seconds since training started.

    Args:
        world: context of this rank.
        ledger: record of the run so far.

    Attributes:
        earlier_s: seconds of training before this session.
        paused_s: seconds that the coordinator spent outside of training, on tests and checkpoints.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world = world
        self._started_at = world.clock.now()
        self.earlier_s = ledger.earlier_s
        self.paused_s = ledger.paused_s

    @property
    def elapsed_s(self) -> float:
        """Seconds of this session since training started."""
        return self._world.clock.now() - self._started_at

    @property
    def total_s(self) -> float:
        """Seconds of training, including those of the runs that it resumes."""
        return self._world.clock.now() - self._started_at + self.earlier_s

    @property
    def trained_s(self) -> float:
        """Seconds of this session that the coordinator spent in training."""
        return self._world.clock.now() - self._started_at - self.paused_s

    def begin(self) -> None:
        """Note that training starts now."""
        self._started_at = self._world.clock.now()

    def take_up(self, began_at_s: float) -> None:
        """Set the time of this rank's clock at which training started."""
        self._started_at = began_at_s

    def emit(self, event: Event) -> None:
        """Emit an event of the coordinator's own, with its time set."""
        self._world.emit(replace(event, time_s=self.elapsed_s))


REPORTS, WINDOW_S = 3, 5.0
"""Minimum number of reports and of seconds for a judgment."""

EXCESS, SPREAD = 0.5, 5.0
_ENOUGH = 0.5
"""Share of the excess below which a straggler counts as recovered."""

_WORSE = 1.5
"""Least ratio to its previously reported slowdown at which a recovered straggler is reported again."""


class _Stretch(NamedTuple):
    seconds: float
    own_s: float
    steps: int


class Stragglers:
    """Step times of all workers, as far as the coordinator knows them."""

    def __init__(self) -> None:
        self._reported_s: dict[int, tuple[float, float]] = {}
        self._stretches: dict[int, deque[_Stretch]] = {}
        self._step_s: dict[int, float] = {}
        self._named: set[int] = set()
        self._reported: dict[int, float] = {}
        self._usual_s = 0.0
        self._since_usual = 0

    def on_progress(self, event: WorkerProgress, paused_s: float = 0.0) -> Straggler | None:
        """Record a worker's progress; return an event if it becomes a straggler or recovers.

        Args:
            event: progress of the worker.
            paused_s: seconds spent outside of training since it began, as by the coordinator during tests.
        """
        worker = event.worker
        before = self._reported_s.get(worker)
        self._reported_s[worker] = event.time_s, paused_s
        if before is None or not event.steps:  # the first report is of a warm-up
            return None
        seconds = event.time_s - before[0] - (paused_s - before[1])
        stretches = self._stretches.setdefault(worker, deque())
        stretches.append(_Stretch(seconds, max(0.0, seconds - event.wait_s), event.steps))
        lengths_s = [each.seconds for each in stretches]
        while len(lengths_s) > REPORTS and sum(lengths_s[1:]) >= WINDOW_S:
            stretches.popleft()
            del lengths_s[0]
        steps = sum([each.steps for each in stretches])
        self._step_s[worker] = sum([each.own_s for each in stretches]) / steps
        enough = len(stretches) >= REPORTS and sum(lengths_s) >= WINDOW_S
        return self._judge(event, steps) if enough and len(self._step_s) > 1 else None

    def forget(self, worker: int) -> None:
        """Drop the times of a worker that has left or failed; its replacement starts without any."""
        for known in (self._reported_s, self._stretches, self._step_s, self._reported):
            known.pop(worker, None)
        self._named.discard(worker)

    def _judge(self, event: WorkerProgress, steps: int) -> Straggler | None:
        usual_s = self._usual()
        if usual_s <= 0:
            return None
        worker, slowdown = event.worker, self._step_s[event.worker] / usual_s
        excess = max(EXCESS, SPREAD / sqrt(steps))
        if worker not in self._named and slowdown > max(1 + excess, _WORSE * self._reported.get(worker, 0.0)):
            self._named.add(worker)
            self._reported[worker] = slowdown
            step_s = self._step_s[worker]
            text = (
                f"worker {worker} is a straggler: its own part of a step takes {step_s:.3g} s, {slowdown:.1f} times "
                f"the median's {usual_s:.3g} s"
            )
        elif worker in self._named and slowdown < 1 + _ENOUGH * excess:
            self._named.remove(worker)
            text = f"worker {worker} keeps up again"
        else:
            return None
        return Straggler(time_s=event.time_s, worker=worker, slowdown=slowdown, text=text)

    def _usual(self) -> float:
        """Return the median over workers; with many workers it is updated only once all have reported again."""
        self._since_usual += 1
        if self._since_usual >= len(self._step_s) // 2 or not self._usual_s:
            self._since_usual = 0
            self._usual_s = median_low(self._step_s.values())
        return self._usual_s
