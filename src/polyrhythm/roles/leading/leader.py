"""The leader: the control plane of worker 0, which trains like any other worker and listens to all ranks.

Events, states and final reports come in; losses, successors and permissions to leave go out. What it does for
the run beside that (tests, checkpoints, figures) are its `Duties`. `WorkerStates` holds the workers' latest
states, and announces losses and successors. `ServerReports` asks servers for the states of their shards and
their final reports. `Neighbours` says who is in lockstep with whom where groups regroup apart, which a leader
that waits must know of a loss. `EventEmitter` emits its own events.
`Introductions` is the list of workers as a new leader hears it from themselves:

worker    ── Introduction, its latest state ─▶ new leader      has been there
newcomer  ── EnterWorker ─▶ waits to be admitted, until some worker has told the leader what its admission must hold

`Stragglers` names workers whose own steps take much longer than the others':

    own time of a step = (time between two reports - waiting - pauses) / steps,   over the last `WINDOW_S` seconds
    straggler          = own time > median * (1 + max(EXCESS, SPREAD / sqrt(steps)))

The second term keeps drawn step times, whose spread is as large as their mean, from being taken for slowness.
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

from polyrhythm.communication.message import Kind, MalformedMessage, Message, unpack_json
from polyrhythm.data.dealing import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.events import (
    Event,
    ServerJoined,
    ServerLost,
    Straggler,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import (
    Account,
    ControlMessage,
    EnterLeader,
    EnterWorker,
    EventReport,
    FinalModel,
    Introduction,
    MayLeave,
    MembershipView,
    ServerReady,
    ShardState,
    ShardStateRequest,
    StepBroken,
    StepsCounted,
    TakenBatches,
    Welcome,
)
from polyrhythm.roles.control_plane import Boundary, ControlPlane, Entry, EvaluatesPart
from polyrhythm.roles.deal import Deal
from polyrhythm.roles.ledger import Attendance, Ledger, ServerAttendance, ServerLosses
from polyrhythm.roles.member import load_untrained, share_untrained
from polyrhythm.roles.regroup import GroupRegroup, Regroup, RegroupCoordinator
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.fault_policy import FaultPolicy, Rejoin
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy, Traits


class Duties:
    """What worker 0 does for the run because it leads: training, a dry run and a user's own loop each have theirs.

    Attributes:
        leader: whose duties they are.
        deal: from which workers draw their batches; None where they have fixed shares.
        dry: whether this is a dry run: successors are given nothing, and hand in accounts in place of states.
        begun: what other numbers of workers did of epochs that are not over.
        elapsed_s: seconds since training started.
        paused_s: for how long the leader was away from training to test and save.
    """

    leader: Leader
    deal: Deal | None = None
    dry = False

    def attach(self, leader: Leader) -> None:
        """Take on the duties of a leader that has just been made."""
        self.leader = leader

    @property
    def begun(self) -> Begun:
        """What other numbers of workers did of epochs that are not over."""
        return Begun()

    @property
    def elapsed_s(self) -> float:
        """Seconds since training started."""
        return 0.0

    @property
    def paused_s(self) -> float:
        """For how long the leader was away from training."""
        return 0.0

    def say(self, event: Event) -> None:
        """Emit an event of the leader's own, whose time is not set: a loss, or a successor."""
        raise NotImplementedError

    def restore(self) -> WorkerState | None:
        """Hand out the newest checkpoint, if the run goes on from one; return worker 0's part of it."""
        return None

    def take_up(self) -> None:
        """This worker, a successor, is about to announce that it leads."""

    def inherit(self) -> None:
        """It has announced itself, and has what nobody trains."""

    def begin(self, epoch: int) -> None:
        """Training starts."""

    def after_step(self) -> None:
        """A step is over; must not wait."""

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
        """All workers have handed in their last states: let the servers and then the workers go."""
        raise NotImplementedError

    def holds_back(self, rank: int, generation: int) -> bool:
        """Whether the duties keep a successor waiting that asks to take part; see `Leader.admit`."""
        return False

    def regrouping(self, number: int) -> None:
        """The leader is about to wait for all workers, since this view has broken."""

    def took(self, worker: int, batches: TakenBatches) -> None:
        """A worker has taken batches of its share."""

    def server_ready(self, rank: int, generation: int) -> None:
        """The successor of a lost server has all of its shards."""


class Leader(ControlPlane):
    """The control plane of rank 0; see `ControlPlane`.

    Where the run survives the loss of a worker, a lost one is not waited for, and its successor is let in.

    Args:
        world: where the leader is.
        strategy: says which losses the run survives.
        duties: what the leader does beside.
        ledger: of the run so far, which a leader's successor takes over.
        replica: this worker's; None in a dry run, or where a user makes it later.

    Attributes:
        replica: as given, or set before `enter`.
        attendance: of the workers.
        workers: the latest state of each.
        servers: their reports and states.
        views: makes the workers' views.
        introductions: of the ranks to a new leader.
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
        self.workers = WorkerStates(world.roles.workers, ledger.attendance, duties.say)
        self.servers = ServerReports(world, faults, ledger.servers, duties.say, self.read_until)
        self.views = RegroupCoordinator(world, strategy, self)
        self.introductions = Introductions()
        self._behind: set[int] = set()
        self._regroups = faults.regroups
        self._regroup: Regroup | None = None
        self._group: GroupRegroup | None = None
        self._neighbours = Neighbours(traits, faults)
        self._meets = traits.lockstep
        self._reads_each_step = faults.goes_on and not duties.dry
        self._leaves_behind = faults.rejoin is Rejoin.BEHIND
        # Neighbours of worker 0 take steps by themselves, and then wait for it; so does a newcomer.
        self._group_in_rounds = faults.regroups_apart and traits.exchange_every != 1
        self._meets_rarely = self._leaves_behind and traits.exchange_every != 1
        self._unheard: set[int] = set()
        """Workers that may wait for this new leader in a round before they have heard that it leads."""
        # How many of each worker are lost, and of how many of these servers have reported what counts.
        self._struck_off: Counter[int] = Counter()
        self._counted: Counter[int] = Counter()
        self._counts: dict[tuple[int, int], dict[int, int]] = {}
        """The steps that count, by worker and losses, as each server reports them, until all have."""
        self._has_leaves = traits.leaves > 0
        self._newer_servers: set[int] = set()
        duties.attach(self)

    # What a worker asks of the control plane.

    def wait_with(self, regroup: Regroup | GroupRegroup) -> None:
        """Set what regroups all workers, or worker 0's group, while this worker waits for states."""
        if isinstance(regroup, Regroup):
            self._regroup = regroup
        else:
            self._group = regroup

    def await_leader(self, loss: PeerLost) -> bool:
        return False

    def call_due(self, number: int, step: int, *, wait: bool) -> bool:
        """Whether somebody is let in before this step, or before the next."""
        return self.views.call_due(number, step, wait=wait)

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
                # It has drawn what its predecessor had not done, unless it counts its steps otherwise.
                losses = self.attendance.losses(LEADER)
                self._give_back(LEADER, self.attendance.last_step(LEADER), losses)

    def after_step(self) -> None:
        """Let successors in, who wait for an answer."""
        self._duties.after_step()
        if self._reads_each_step:
            self.read()

    def report(self, fact: Event | TakenBatches) -> None:
        if isinstance(fact, TakenBatches):
            self._duties.took(LEADER, fact)
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
    ) -> None:
        self.workers.take(record)
        self._duties.boundary(why, record, epochs, presented, test)

    def work_done(self, record: WorkerState) -> bool:
        if self._dry:  # others hand nothing in before they leave
            return True
        assert self.deal is not None, "only who draws asks"
        self.workers.take(record)
        self.wait_for_work_done()
        while any(losses > self._counted[worker] for worker, losses in self._struck_off.items()):
            self._hear_or_regroup()
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
    def deal(self) -> Deal | None:
        """From which workers draw their batches; None where they have fixed shares."""
        return self._duties.deal

    def _open_deal(self) -> None:
        if (deal := self.deal) is not None:
            for worker in range(len(self._world.roles.workers)):
                losses = self.attendance.losses(worker)
                if worker not in self.attendance.present:
                    self._give_back(worker, self.attendance.last_step(worker), losses)
                elif self._world.rejoins and worker != LEADER:
                    deal.inherit(worker, losses)
            deal.open()

    def _give_back(self, worker: int, step: int, losses: int, *, said: bool = True) -> None:
        if self.deal is not None:
            self.deal.lose(worker, step, losses, said=said)

    # What duties ask of the leader.

    def hand_out(
        self, workers: dict[int, WorkerState], servers: list[State], behind: Collection[int] = ()
    ) -> None:
        """Send every other rank the state that it resumes from.

        Args:
            workers: every other's state.
            servers: the state of every shard.
            behind: workers that have done fewer steps than the leader.
        """
        self._behind.update(behind)
        for server, rank in enumerate(self._world.roles.servers):
            for shard in self._faults.shards_of(server):
                self._control.send(rank, ShardState(shard, *servers[shard]).message())
        for worker, state in workers.items():
            self._send(self._world.roles.workers[worker], state)

    def admit(self, rank: int, generation: int) -> None:
        """Let a successor of a lost worker in; where workers regroup, it waits for the next view."""
        worker = self._world.roles.workers.index(rank)
        self._see(worker, generation)
        self.views.left.discard(worker)  # the one that left was killed before this coordinator had let it go
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

    def let_leave(self) -> None:
        """Let the workers leave that have sent their final state; until now they kept it for a new leader."""
        if self._world.goes_on_without(LEADER, self._faults):
            for worker in self.workers.states:
                if worker != LEADER:
                    self.tell_worker(worker, MayLeave())

    def wait_for_step(self, step: int) -> None:
        """Wait until every worker has sent its state of this step, or has stopped before it.

        A successor that is behind, and so may wait for the leader, is not waited for.
        """
        self._wait_for_all(lambda account: account.step >= step or account.stopped)

    def wait_for_work_done(self) -> None:
        """Wait until every worker has stopped, or found that nothing is left to draw."""
        self._wait_for_all(lambda account: account.through or account.stopped)

    def wait_for_stop(self, steps: int) -> None:
        """Wait until every worker has stopped early, or taken all steps; it may not have left yet.

        Args:
            steps: that every worker takes.
        """
        self._wait_for_all(lambda account: account.stopped or account.final or account.step >= steps)

    def tell_worker(self, worker: int, message: ControlMessage) -> None:
        """Send a worker a message, unless it is lost."""
        self._send_if_there(self._world.roles.workers[worker], message.message())

    # Listening.

    def read(self) -> None:
        """Handle the messages that have arrived, without waiting."""
        while self._hear(self._control.poll):
            pass

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Handle messages as they arrive, until `enough` returns true."""
        while not enough():
            self._hear(self._control.receive)

    def is_final(self, worker: int) -> bool:
        """Whether a worker has sent its final state."""
        return self.workers.is_final(worker)

    def _wait_for_all(self, done: Callable[[Account], bool]) -> None:
        """Wait until `done` holds for every present worker that cannot be waiting for the leader; regroup meanwhile."""
        states = self.workers.states
        while not all(
            self._may_wait(worker) or (worker in states and done(states[worker].account))
            for worker in self.attendance.present
        ):
            self._hear_or_regroup()

    def _wait_for_all_final(self) -> None:
        final, present = self.workers.final, self.attendance.present
        # Thousands hand their last states in one by one: all are looked at only where their number is right.
        while len(final) < len(present) or not present <= final:
            self._hear_or_regroup()

    def _hear_or_regroup(self) -> None:
        if self._regroup is not None and self.views.pending.due:
            self._regroup.reform()
        elif self._group is not None and (self._meets or self._group_in_rounds) and self._group.due:
            self._group.reform()
        else:
            self._hear(self._control.receive)

    def _may_wait(self, worker: int) -> bool:
        """Whether a worker may be waiting for the leader's next step, so that waiting for it would be a deadlock."""
        if worker not in self._behind and worker not in self._unheard:
            return False
        return self._leaves_behind or self._neighbours.beside_leader(worker)

    def _hear(self, get: Callable[[], tuple[int, Message] | None]) -> bool:
        """Handle one message or one loss; return whether there was either."""
        try:
            found = get()
        except PeerLost as loss:
            server = loss.rank in self._world.roles.servers
            through = self.servers.reports if server else map(self._rank, self.workers.final)
            if loss.rank not in through and not self._world.goes_on_without(loss.rank, self._faults):
                raise
            if server:
                self.servers.lose(loss.rank)
                self._newer_servers.add(loss.rank)
                if not self._counting_servers:  # nobody may be left who reports what counts
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
            self._hand_in(WorkerState.from_message(message))
        elif kind is Kind.ACCOUNT:
            self._hand_in(WorkerState(Account.from_message(message), {}, {}, {}))
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
        elif kind is Kind.TAKEN:
            self._duties.took(self._worker(source), TakenBatches.from_message(message))
        else:
            raise MalformedMessage(f"rank {source} sent the leader a {kind.name} message")

    def _rank(self, worker: int) -> int:
        return self._world.roles.workers[worker]

    def _worker(self, rank: int) -> int:
        return self._world.roles.workers.index(rank)

    def _hand_in(self, state: WorkerState) -> None:
        account = state.account
        self.workers.take(state)
        if self._dry:
            self.workers.see(account.worker, 0)
        elif self._regroups and account.stopped and account.final:
            self._world.stop.request()  # after a step that the others may have to take again

    def _pass_on(self, event: Event, paused_s: float = 0.0) -> None:
        emit = self._world.emit
        if not isinstance(event, WorkerProgress):
            emit(event)
            return
        if self._dry:  # a successor says by its first report that it is there
            self.workers.see(event.worker, 0)
        self.attendance.note(event)
        emit(event)
        if news := self.workers.stragglers.on_progress(event, paused_s):
            emit(news)

    # Losses, and newcomers.

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
            self._behind.update(self._neighbours.held_up_by(worker))  # who cannot finish a step without it
            if self._group is not None and self._neighbours.beside_leader(worker):
                self._group.lose(worker, self.attendance.losses(worker))

    @property
    def _counting_servers(self) -> set[int]:
        """Servers of which each reports the steps that count of every lost worker.

        A leaf knows of its own workers alone, and the successor of a lost server of later losses alone.
        """
        return set() if self._has_leaves else {*self.servers.attendance.present} - self._newer_servers

    def _settle_counts(self) -> None:
        """Give back the batches of lost workers once all servers have reported what counts: what all of them have."""
        for (worker, losses), steps in sorted(self._counts.items()):
            if self._counting_servers <= steps.keys():
                del self._counts[worker, losses]
                self._counted[worker] = max(self._counted[worker], losses)
                self._give_back(worker, min(steps.values()), losses)

    def _lose(self, worker: int) -> None:
        """Give a worker up for lost; without servers, which say what counts of it, by what it has said of itself."""
        attendance = self.attendance
        said = attendance.has_spoken(worker)
        self.workers.lose(worker)
        if not self._world.roles.servers:
            self._give_back(worker, attendance.last_step(worker), attendance.losses(worker), said=said)

    def _see(self, worker: int, generation: int) -> None:
        """Enter a worker that is there; who came before it must be lost."""
        while self.attendance.losses(worker) < generation:
            self._lose(worker)
        self.workers.see(worker, generation)

    def _ask_to_enter(self, rank: int, generation: int) -> None:
        if self._duties.holds_back(rank, generation):
            return
        if self.introductions.on_newcomer(self._worker(rank), rank, generation):
            self.admit(rank, generation)

    def _meet(self, source: int, message: Introduction) -> None:
        """Take a worker's introduction to this new leader."""
        worker = self._worker(source)
        self._unheard.discard(worker)
        self._see(worker, message.generation)
        if message.generation or message.behind:
            self._behind.update({worker, *self._neighbours.held_up_by(worker)})
        self.introductions.on_message(worker, message)

    def _take_over(self) -> None:
        """Announce this rank, a successor of the leader, as the new one; all then send their latest state again."""
        generation = self._world.generation
        self.workers.see(LEADER, generation)
        rarely = self._meets_rarely or self._group_in_rounds
        self._unheard = self.attendance.present - {LEADER} if rarely else set()
        for worker in range(len(self._world.roles.workers)):
            if self.attendance.losses(worker):
                self._behind.update(self._neighbours.held_up_by(worker))
        word = EnterLeader(generation).message()
        for rank in range(self._world.network.size):
            if rank != LEADER:  # in the background: one that hangs keeps nobody else waiting
                self._control.start(partial(self._send_if_there, rank, word))

    def _inherit_untrained(self) -> None:
        """Take what is not trained from the first worker that is heard; successors, who need it too, wait meanwhile."""
        if self.replica is None or not self.replica.untrained:
            return
        known, present = self.introductions, self.attendance.present
        known.hold_back()
        self.read_until(lambda: known.untrained is not None or known.none_left(present))
        if known.untrained is not None:
            load_untrained(self.replica, known.untrained)
        for rank, generation in known.held_back():
            self.admit(rank, generation)

    def _send_if_there(self, rank: int, message: Message) -> None:
        with suppress(PeerLost):  # which a receive reports
            self._control.send(rank, message)

    def _send(self, rank: int, message: ControlMessage) -> None:
        try:
            self._control.send(rank, message.message())
        except PeerLost:
            if not self._world.goes_on_without(rank, self._faults):
                raise


class WorkerStates:
    """Records the workers' latest states, and announces losses and successors.

    Args:
        ranks: the workers', by their indices.
        attendance: of the workers.
        say: takes the leader's own events, whose times it sets.

    Attributes:
        states: the latest of every worker that is there.
        final: the workers whose latest state is their last.
        stragglers: among the workers.
    """

    def __init__(self, ranks: tuple[int, ...], attendance: Attendance, say: Callable[[Event], None]) -> None:
        self.states: dict[int, WorkerState] = {}
        self.final: set[int] = set()
        self.stragglers = Stragglers()
        self._ranks = ranks
        self._attendance = attendance
        self._say = say

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
        """Drop the state of a worker that is gone."""
        self.states.pop(worker, None)
        self.final.discard(worker)

    def lose(self, worker: int) -> None:
        """Strike a worker off, and say so."""
        self.forget(worker)
        step = self._attendance.lose(worker)
        self._say(WorkerLost(time_s=0, worker=worker, rank=self._ranks[worker], step=step))

    def see(self, worker: int, generation: int) -> None:
        """Enter a worker that is there, and say so, unless it is known. Who came before it must be lost.

        Args:
            worker: its index.
            generation: how many have had its rank before.
        """
        while self._attendance.losses(worker) < generation:
            self.lose(worker)
        if worker not in self._attendance.present:
            self._attendance.join(worker)
            self.stragglers.forget(worker)
            self._say(WorkerJoined(time_s=0, worker=worker, rank=self._ranks[worker]))


class ServerReports:
    """Asks servers for what the leader needs, and collects it.

    Args:
        world: where it is.
        faults: says which shards each server holds, and which losses the run survives.
        losses: so far.
        say: emits an event of the leader's, and sets its time.
        read_until: handles messages until a condition holds.

    Attributes:
        attendance: of the servers.
        reports: every server's final report, by its rank.
    """

    def __init__(
        self,
        world: World,
        faults: FaultPolicy,
        losses: ServerLosses,
        say: Callable[[Event], None],
        read_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.attendance = ServerAttendance(world.roles.servers, faults, losses)
        self.reports: dict[int, dict[str, Any]] = {}
        self._world = world
        self._say = say
        self._read_until = read_until
        self._states: dict[int, State] | None = None

    def wait(self) -> None:
        """Wait for the final report of every server, sent once it has been let go."""
        self._read_until(lambda: all(rank in self.reports for rank in self.attendance.present))

    def ask(self) -> list[State]:
        """Return the state of every shard, asked of the servers that hold it now."""
        shards = range(len(self._world.roles.servers))
        found = self._states = {}
        for shard in shards:
            self._ask_for(shard)
        self._read_until(lambda: len(found) == len(shards))
        self._states = None
        return [found[shard] for shard in shards]

    def on_message(self, source: int, message: Message) -> None:
        """Take a server's final report, or a shard's state if one was asked for."""
        assert message.tensor is not None, "both carry a payload"
        if message.kind is Kind.REPORT:
            self.reports[source] = unpack_json(message.tensor)
        elif self._states is not None:
            state = ShardState.from_message(message)
            self._states[state.shard] = state.tensors, state.facts

    def lose(self, rank: int) -> None:
        """Note that a server is lost, unless it had sent its final report; ask others for shards that it still owed.

        Raises:
            PeerLost: nobody has kept its shard.
        """
        if rank in self.reports or not self.attendance.lose(rank):
            return
        name = self.attendance.name(rank)
        self._say(
            ServerLost(time_s=0, text=f"{name} is lost; who has kept its shard goes on with it", rank=rank)
        )
        if self._states is not None:
            for shard in self.attendance.shards_of(rank):
                if shard not in self._states:
                    self._ask_for(shard)

    def enter(self, rank: int) -> None:
        """Note that a successor of a lost server has all of its shards."""
        self.attendance.losses.join(rank)
        text = f"{self.attendance.name(rank)} is there again, and has its shards from its neighbours"
        self._say(ServerJoined(time_s=0, text=text, rank=rank))

    def _ask_for(self, shard: int) -> None:
        with suppress(PeerLost):  # as is heard on the other communicator as well, and then others are asked
            self._world.network.send(self.attendance.holder(shard), ShardStateRequest(shard).message())


class Introductions:
    """One leader's list.

    Attributes:
        untrained: what the first has told that it holds and nobody trains, by name.
    """

    def __init__(self) -> None:
        self.untrained: dict[str, Tensor] | None = None
        self._newcomers: set[int] = set()
        self._follows: dict[int, bool] = {}
        self._asking: dict[int, tuple[int, int]] | None = None

    def on_message(self, worker: int, message: Introduction) -> None:
        """Take a worker's introduction, which says as well whether a state follows."""
        self._follows[worker] = message.record_follows
        self.untrained = self.untrained or message.untrained

    def on_newcomer(self, worker: int, rank: int, generation: int) -> bool:
        """Note that a newcomer asks to be let in; return whether that can be done now."""
        self._newcomers.add(worker)
        if self._asking is None:
            return True
        self._asking[worker] = rank, generation
        return False

    def lose(self, worker: int) -> None:
        """Forget a newcomer that is gone."""
        if self._asking is not None:
            self._asking.pop(worker, None)

    def hold_back(self) -> None:
        """Has newcomers wait from now on."""
        self._asking = {}

    def held_back(self) -> list[tuple[int, int]]:
        """Return those who wait, by rank and generation; from now on nobody need."""
        asking, self._asking = self._asking or {}, None
        return list(asking.values())

    def none_left(self, present: Collection[int]) -> bool:
        """Whether all others who are there are newcomers."""
        return set(present) <= {LEADER} | self._newcomers

    def complete(self, present: Collection[int], handed_in: Collection[int]) -> bool:
        """Whether all who are there have introduced themselves, and their states have come.

        Args:
            present: who is there.
            handed_in: whose states have come.
        """
        return all(
            worker in self._newcomers or not self._follows.get(worker, True) or self._has(worker, handed_in)
            for worker in present
            if worker != LEADER
        )

    def _has(self, worker: int, handed_in: Collection[int]) -> bool:
        return worker in self._follows and worker in handed_in


class Neighbours:
    """The groups of a run.

    Args:
        traits: of the run.
        faults: of the run; where groups do not regroup apart, each worker is a group of its own.
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
    """Emits the leader's own events, with their times in seconds since training started.

    Args:
        world: where the leader is.
        ledger: of the run so far.

    Attributes:
        earlier_s: seconds of training before this session.
        paused_s: for how long the leader was away from training to test and save.
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
        """The same, with those of the runs that it resumes."""
        return self._world.clock.now() - self._started_at + self.earlier_s

    @property
    def trained_s(self) -> float:
        """Seconds of this session without those in which the leader was away."""
        return self._world.clock.now() - self._started_at - self.paused_s

    def begin(self) -> None:
        """Note that training starts now."""
        self._started_at = self._world.clock.now()

    def take_up(self, began_at_s: float) -> None:
        """Note that training started at a time of this rank's clock."""
        self._started_at = began_at_s

    def say(self, event: Event) -> None:
        """Emit an event of the leader's own, with its time set."""
        self._world.emit(replace(event, time_s=self.elapsed_s))


REPORTS, WINDOW_S = 3, 5.0
"""At least so many reports, and so many seconds, are judged by."""

EXCESS, SPREAD = 0.5, 5.0
_ENOUGH = 0.5
"""Of the excess: whoever has less than this share of it keeps up again."""

_WORSE = 1.5
"""Whoever has kept up again is named anew only if it is so many times as slow as it was said to be before."""


class _Stretch(NamedTuple):
    seconds: float
    own_s: float
    steps: int


class Stragglers:
    """The leader's view of how fast everyone is."""

    def __init__(self) -> None:
        self._reported_s: dict[int, tuple[float, float]] = {}
        self._stretches: dict[int, deque[_Stretch]] = {}
        self._step_s: dict[int, float] = {}
        self._named: set[int] = set()
        self._said: dict[int, float] = {}
        self._usual_s = 0.0
        self._since_usual = 0

    def on_progress(self, event: WorkerProgress, paused_s: float = 0.0) -> Straggler | None:
        """Take what a worker says of itself; return what there is to say of it.

        Args:
            event: of the worker.
            paused_s: for which it has not trained since it began, as the leader while it tests.
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
        """A worker is gone; its successor is another."""
        for known in (self._reported_s, self._stretches, self._step_s, self._said):
            known.pop(worker, None)
        self._named.discard(worker)

    def _judge(self, event: WorkerProgress, steps: int) -> Straggler | None:
        usual_s = self._usual()
        if usual_s <= 0:
            return None
        worker, slowdown = event.worker, self._step_s[event.worker] / usual_s
        excess = max(EXCESS, SPREAD / sqrt(steps))
        if worker not in self._named and slowdown > max(1 + excess, _WORSE * self._said.get(worker, 0.0)):
            self._named.add(worker)
            self._said[worker] = slowdown
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
        """Return the median over workers; of very many it is taken anew only when all have reported once more."""
        self._since_usual += 1
        if self._since_usual >= len(self._step_s) // 2 or not self._usual_s:
            self._since_usual = 0
            self._usual_s = median_low(self._step_s.values())
        return self._usual_s
