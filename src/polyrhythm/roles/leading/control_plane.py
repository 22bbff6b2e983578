"""The leader's control plane: its messages with all other ranks, and what it knows of them.

Events, states and final reports come in; losses, successors and permissions to leave go out. `Roll` holds the
workers' latest states, and announces losses and successors. `ServerReports` asks servers for the states of
their shards and their final reports. `Neighbours` says who is in lockstep with whom where groups regroup
apart, which a leader that waits must know of a loss. `Introductions` is the list of workers as a new leader
hears it from themselves:

worker    ── LEAD(untrained), its latest state ─▶ new leader      has been there
newcomer  ── JOIN ─▶ waits to be admitted, until some worker has told the leader what its admission must hold
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_json, unpack_tensors
from polyrhythm.errors import PeerLost
from polyrhythm.events import (
    Event,
    ServerJoined,
    ServerLost,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
    from_json,
)
from polyrhythm.roles.keeping.worker_state import Account, WorkerState
from polyrhythm.roles.leader_channel import TAG
from polyrhythm.roles.leading.stragglers import Stragglers
from polyrhythm.roles.ledger import Attendance, Ledger, ServerAttendance, ServerLosses
from polyrhythm.roles.regrouping.regroup import GroupRegroup
from polyrhythm.roles.regrouping.regroup_coordinator import Assembly
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.fault_policy import FaultPolicy, Rejoin
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy, Traits


class Correspondence:
    """Receives and sends the leader's control messages.

    Where the run survives the loss of a worker, a lost one is not waited for, and its successor is let in.

    Args:
        world: where the leader is.
        strategy: says which losses the run survives.
        say: emits an event of the leader's, and sets its time.
        welcome: makes the message that lets a successor in.
        ledger: of the run so far, which a leader's successor takes over.

    Attributes:
        attendance: of the workers.
        workers: the latest state of each.
        servers: their reports and states.
        assembly: makes the workers' formations.
        reform: regroups all workers; set where they do so together.
        group: regroups the leader's own group, where groups regroup apart.
        introductions: of the ranks to a new leader.
        takes: is given every message first; returns whether it has handled it.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        say: Callable[[Event], None],
        welcome: Callable[[], Welcome],
        ledger: Ledger,
    ) -> None:
        self._world = world
        traits, faults = strategy.traits(len(world.cast.workers)), strategy.faults(len(world.cast.workers))
        self._faults = faults
        self._control = world.control()
        self._welcome = welcome
        self.attendance = ledger.attendance
        self.workers = Roll(world.cast.workers, ledger.attendance, say)
        self.servers = ServerReports(world, faults, ledger.servers, say, self.read_until)
        self._behind: set[int] = set()
        self._regroups = faults.regroups
        self.assembly = Assembly(world, strategy, self)
        self.introductions = Introductions()
        self.reform: Callable[[], None] | None = None
        self.group: GroupRegroup | None = None
        self._neighbours = Neighbours(traits, faults)
        self._meets = traits.lockstep
        self._leaves_behind = faults.rejoin is Rejoin.BEHIND
        self._meets_rarely = self._leaves_behind and traits.exchange_every != 1
        self._unheard: set[int] = set()
        """Workers that may wait for this new leader in a round before they have heard that it leads."""
        self.takes: Callable[[int, Message], bool] = lambda source, message: False

    def hand_out(
        self, workers: dict[int, WorkerState], servers: list[State], behind: Collection[int] = ()
    ) -> None:
        """Sends every other rank the state that it resumes from.

        Args:
            workers: every other's state.
            servers: the state of every shard.
            behind: workers that have done fewer steps than the leader.
        """
        self._behind.update(behind)
        for server, rank in enumerate(self._world.cast.servers):
            for shard in self._faults.shards_of(server):
                self._control.send(rank, Message(Kind.STATE, pack_tensors(*servers[shard])))
        for worker, state in workers.items():
            message = state.message()._replace(step=int(worker in behind))
            self._send(self._world.cast.workers[worker], message)

    def take_over(self) -> None:
        """Announces this rank, a successor of the leader, as the new one; all then send their latest state again."""
        incarnation = self._world.incarnation
        self.workers.see(LEADER, incarnation)
        self._unheard = self.attendance.present - {LEADER} if self._meets_rarely else set()
        for worker in range(len(self._world.cast.workers)):
            if self.attendance.losses(worker):
                self._behind.update(self._neighbours.held_up_by(worker))
        word = Message(Kind.LEAD, version=incarnation, tag=TAG)
        for rank in range(self._world.network.size):
            if rank != LEADER:  # in the background: one that hangs keeps nobody else waiting
                self._control.start(partial(self.send_if_there, rank, word))

    def await_untrained(self) -> dict[str, Tensor] | None:
        """Waits for a worker's untrained tensors; gives them, or None where no worker has any.

        Successors wait meanwhile, since these are part of their welcome; see `welcome_all`.
        """
        known, present = self.introductions, self.attendance.present
        known.hold_back()
        self.read_until(lambda: known.untrained is not None or known.none_left(present))
        return known.untrained

    def welcome_all(self) -> None:
        """Lets successors in that asked for it during `await_untrained`."""
        for rank, incarnation in self.introductions.held_back():
            self.enter(rank, incarnation)

    def await_introductions(self) -> None:
        """Waits until all workers have introduced themselves to this new leader, and sent their latest state again."""
        self.read_until(lambda: self.introductions.complete(self.attendance.present, self.workers.states))

    def let_leave(self) -> None:
        """Lets the workers leave that have sent their final state; until now they kept it for a new leader."""
        if self._world.goes_on_without(LEADER, self._faults):
            for worker in self.workers.states:
                if worker != LEADER:
                    self.send_if_there(self._world.cast.workers[worker], Message(Kind.LEAVE, tag=TAG))

    def read(self) -> None:
        """Handles the messages that have arrived, without waiting."""
        while self._hear(self._control.poll):
            pass

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Handles messages as they arrive, until `enough` gives true."""
        while not enough():
            self._hear(self._control.receive)

    def is_final(self, worker: int) -> bool:
        """Whether a worker has sent its final state."""
        return self.workers.is_final(worker)

    def wait_for_step(self, step: int) -> None:
        """Waits until every worker has sent its state of this step, or has stopped before it.

        A successor that is behind, and so may wait for the leader, is not waited for.
        """
        self._wait_for_all(lambda account: account.step >= step or account.stopped, self._may_wait)

    def wait_for_stop(self, steps: int) -> None:
        """Waits until every worker has stopped early, or taken all steps; it may not have left yet.

        Args:
            steps: that every worker takes.
        """
        self._wait_for_all(
            lambda account: account.stopped or account.final or account.step >= steps, self._may_wait
        )

    def _may_wait(self, worker: int) -> bool:
        """Whether a worker may be waiting for the leader's next step, so that waiting for it would be a deadlock."""
        return self._leaves_behind and (worker in self._behind or worker in self._unheard)

    def wait_for_workers(self) -> None:
        """Waits for the final state of every worker."""
        self._wait_for_all(lambda account: account.final)

    def _wait_for_all(
        self, done: Callable[[Account], bool], but: Callable[[int], bool] = lambda worker: False
    ) -> None:
        """Waits until `done` holds for the state of every present worker, except those of `but`; regroups meanwhile."""
        states = self.workers.states
        while not all(
            but(worker) or (worker in states and done(states[worker].account))
            for worker in self.attendance.present
        ):
            if self.reform is not None and self.assembly.muster.due:
                self.reform()
            elif self.group is not None and self._meets and self.group.due:
                self.group.reform()
            else:
                self._hear(self._control.receive)

    def _hear(self, get: Callable[[], tuple[int, Message] | None]) -> bool:
        """Handles one message or one loss; gives whether there was either."""
        try:
            found = get()
        except PeerLost as loss:
            if not self._world.goes_on_without(loss.rank, self._faults):
                raise
            if loss.rank in self._world.cast.servers:
                self.servers.lose(loss.rank)
            else:
                self._strike_off(loss.rank)
            return True
        if found is not None and not self.takes(*found):
            self._take(*found)
        return found is not None

    def _strike_off(self, rank: int) -> None:
        worker = self._world.cast.workers.index(rank)
        self.introductions.lose(worker)
        if worker in self.attendance.present and self.is_final(worker):
            self.assembly.left.add(worker)
        elif worker in self.attendance.present:
            self.assembly.muster.lose(worker)
            self.workers.lose(worker)
            self._hold_up(worker)

    def _hold_up(self, worker: int) -> None:
        """Notes who cannot finish a step without a lost worker: its group, which worker 0 may be in."""
        self._behind.update(self._neighbours.held_up_by(worker))
        if self.group is not None and self._neighbours.beside_leader(worker):
            self.group.lose(worker)

    def _ask_to_enter(self, rank: int, incarnation: int) -> None:
        worker = self._world.cast.workers.index(rank)
        if self.introductions.on_newcomer(worker, rank, incarnation):
            self.enter(rank, incarnation)

    def enter(self, rank: int, incarnation: int) -> None:
        """Lets a successor of a lost worker in; where workers regroup, it waits for the next formation."""
        worker = self._world.cast.workers.index(rank)
        self.workers.see(worker, incarnation)
        self.workers.states.pop(worker, None)
        self._send(rank, self._welcome().message())
        if self._regroups:
            self.assembly.muster.enter(worker, incarnation)
        else:
            self._behind.add(worker)

    def _meet(self, source: int, message: Message) -> None:
        """Takes a worker's introduction to this new leader."""
        worker = self._world.cast.workers.index(source)
        self._unheard.discard(worker)
        self.workers.see(worker, message.version)
        if message.version or message.step:
            self._behind.update({worker, *self._neighbours.held_up_by(worker)})
        self.introductions.on_message(worker, message)

    def _take(self, source: int, message: Message) -> None:
        if message.kind is Kind.JOIN and source in self._world.cast.servers:
            self.servers.enter(source)
            return
        if message.kind is Kind.JOIN:
            self._ask_to_enter(source, message.version)
            return
        if message.kind is Kind.LEAD:
            self._meet(source, message)
            return
        assert message.tensor is not None, "every other control message carries a payload"
        if message.kind is Kind.BROKEN:
            self.assembly.muster.on_message(self._world.cast.workers.index(source), message)
        elif message.kind is Kind.EVENT:
            self._pass_on(from_json(unpack_json(message.tensor)))
        elif message.kind is Kind.REPORT or source in self._world.cast.servers:
            self.servers.on_message(source, message)
        else:
            state = WorkerState.from_message(message)
            self.workers.states[state.account.worker] = state
            if self._regroups and state.account.stopped and state.account.final:
                self._world.stop.request()  # after a step that the others may have to take again

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, WorkerProgress):
            self.attendance.note(event)
        self._world.emit(event)
        if isinstance(event, WorkerProgress) and (news := self.workers.stragglers.on_progress(event)):
            self._world.emit(news)

    def send_if_there(self, rank: int, message: Message) -> None:
        """Sends, unless that rank is lost."""
        with suppress(PeerLost):  # which a receive reports
            self._control.send(rank, message)

    def _send(self, rank: int, message: Message) -> None:
        try:
            self._control.send(rank, message)
        except PeerLost:
            if not self._world.goes_on_without(rank, self._faults):
                raise


class Roll:
    """Records the workers' latest states, and announces losses and successors.

    Args:
        ranks: the workers', by their indices.
        attendance: of the workers.
        say: takes the leader's own events, whose times it sets.

    Attributes:
        states: the latest of every worker that is there.
        stragglers: among the workers.
    """

    def __init__(self, ranks: tuple[int, ...], attendance: Attendance, say: Callable[[Event], None]) -> None:
        self.states: dict[int, WorkerState] = {}
        self.stragglers = Stragglers()
        self._ranks = ranks
        self._attendance = attendance
        self._say = say

    @property
    def in_order(self) -> list[WorkerState]:
        """The latest states, in the workers' order."""
        return [self.states[worker] for worker in sorted(self.states)]

    def is_final(self, worker: int) -> bool:
        """Whether a worker has said its last words."""
        return worker in self.states and self.states[worker].account.final

    def lose(self, worker: int) -> None:
        """Strikes a worker off, and says so."""
        self.states.pop(worker, None)
        step = self._attendance.lose(worker)
        self._say(WorkerLost(time_s=0, worker=worker, rank=self._ranks[worker], step=step))

    def see(self, worker: int, incarnation: int) -> None:
        """Enters a worker that is there, and says so, unless it is known. Who came before it must be lost.

        Args:
            worker: its index.
            incarnation: how many have had its place before.
        """
        while self._attendance.losses(worker) < incarnation:
            self.lose(worker)
        if worker not in self._attendance.present:
            self._attendance.join(worker)
            self.stragglers.forget(worker)
            self._say(WorkerJoined(time_s=0, worker=worker, rank=self._ranks[worker]))


class ServerReports:
    """Asks servers for what the leader needs, and collects it.

    Args:
        world: where it is.
        strategy: says which shards each server holds, and which losses the run survives.
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
        self.attendance = ServerAttendance(world.cast.servers, faults, losses)
        self.reports: dict[int, dict[str, Any]] = {}
        self._world = world
        self._say = say
        self._read_until = read_until
        self._states: dict[int, State] | None = None

    def wait(self) -> None:
        """Waits for the final report of every server, sent once it has been let go."""
        self._read_until(lambda: all(rank in self.reports for rank in self.attendance.present))

    def ask(self) -> list[State]:
        """Gives the state of every shard, asked of the servers that hold it now."""
        shards = range(len(self._world.cast.servers))
        found = self._states = {}
        for shard in shards:
            self._ask_for(shard)
        self._read_until(lambda: len(found) == len(shards))
        self._states = None
        return [found[shard] for shard in shards]

    def on_message(self, source: int, message: Message) -> None:
        """Takes a server's final report, or a shard's state if one was asked for."""
        assert message.tensor is not None, "both carry a payload"
        if message.kind is Kind.REPORT:
            self.reports[source] = unpack_json(message.tensor)
        elif self._states is not None:
            self._states[message.step] = unpack_tensors(message.tensor)

    def lose(self, rank: int) -> None:
        """Notes that a server is lost, unless it had sent its final report; asks others for shards that it still owed.

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
        """Notes that a successor of a lost server has all of its shards."""
        self.attendance.losses.join(rank)
        text = f"{self.attendance.name(rank)} is there again, and has its shards from its neighbours"
        self._say(ServerJoined(time_s=0, text=text, rank=rank))

    def _ask_for(self, shard: int) -> None:
        with suppress(PeerLost):  # as is heard on the other communicator as well, and then others are asked
            self._world.network.send(self.attendance.holder(shard), Message(Kind.CHECKPOINT, step=shard))


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

    def on_message(self, worker: int, message: Message) -> None:
        """Takes a worker's introduction, which says as well whether a state follows."""
        assert message.tensor is not None, "a worker says what it holds"
        self._follows[worker] = message.weight > 0
        self.untrained = self.untrained or unpack_tensors(message.tensor)[0]

    def on_newcomer(self, worker: int, rank: int, incarnation: int) -> bool:
        """Notes that a newcomer asks to be let in; gives whether that can be done now."""
        self._newcomers.add(worker)
        if self._asking is None:
            return True
        self._asking[worker] = rank, incarnation
        return False

    def lose(self, worker: int) -> None:
        """Forgets a newcomer that is gone."""
        if self._asking is not None:
            self._asking.pop(worker, None)

    def hold_back(self) -> None:
        """Has newcomers wait from now on."""
        self._asking = {}

    def held_back(self) -> list[tuple[int, int]]:
        """Gives those who wait, by rank and incarnation; from now on nobody need."""
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
        """Gives the workers that may fall behind worker 0 when one, given by its index, is lost."""
        return () if self.beside_leader(worker) else self._group_of.get(worker, ())
