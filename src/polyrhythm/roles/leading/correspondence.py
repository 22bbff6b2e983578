"""The leader's message exchange with all other ranks: their events, states and final reports, losses and successors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_json
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event, WorkerProgress, from_json
from polyrhythm.roles.keeping.worker_state import Account, WorkerState
from polyrhythm.roles.leader_channel import TAG
from polyrhythm.roles.leading.roll import Roll
from polyrhythm.roles.leading.server_reports import ServerReports
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.regrouping.assembly import Assembly
from polyrhythm.roles.regrouping.group_regroup import GroupRegroup
from polyrhythm.roles.regrouping.introductions import Introductions
from polyrhythm.roles.regrouping.neighbours import Neighbours
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


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
        self._strategy = strategy
        self._control = world.control()
        self._welcome = welcome
        self.attendance = ledger.attendance
        self.workers = Roll(world.cast.workers, ledger.attendance, say)
        self.servers = ServerReports(world, strategy, ledger.servers, say, self.read_until)
        self._behind: set[int] = set()
        self._regroups = strategy.regroups(len(world.cast.workers))
        self.assembly = Assembly(world, strategy, self)
        self.introductions = Introductions()
        self.reform: Callable[[], None] | None = None
        self.group: GroupRegroup | None = None
        self._neighbours = Neighbours(strategy, world.cast)
        self._meets = strategy.in_step(len(world.cast.workers))
        self._leaves_behind = strategy.leaves_behind(len(world.cast.workers))
        self._meets_rarely = self._leaves_behind and strategy.round_steps(len(world.cast.workers)) != 1
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
            for shard in self._strategy.holds(server):
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
        if self._world.goes_on_without(LEADER, self._strategy):
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
            if not self._world.goes_on_without(loss.rank, self._strategy):
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
            if not self._world.goes_on_without(rank, self._strategy):
                raise
