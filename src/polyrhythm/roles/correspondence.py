"""What the other ranks tell the leader: events, states and last reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_json, unpack_tensors
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event, WorkerJoined, WorkerLost, WorkerProgress, from_json
from polyrhythm.roles.attendance import Attendance
from polyrhythm.roles.formation import Done, Formation, Muster
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.worker_state import Account, WorkerState
from polyrhythm.roles.world import World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


class Correspondence:
    """The leader's side of the control messages.

    Where the strategy goes on without a worker, nobody waits for one that is lost, and a successor is welcome.

    Args:
        world: where the leader is.
        strategy: says which losses can be borne.
        say: takes the leader's own events, whose times it sets.
        welcome: makes what a successor is given.

    Attributes:
        attendance: of the workers.
        states: the latest of every worker that is there.
        reports: every server's last words, by its rank.
        mend: lets workers regroup; set where they do.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        say: Callable[[Event], None],
        welcome: Callable[[], Welcome],
    ) -> None:
        self._world = world
        self._strategy = strategy
        self._control = world.control()
        self._say = say
        self._welcome = welcome
        self.attendance = Attendance(len(world.cast.workers))
        self.states: dict[int, WorkerState] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self._server_states: dict[int, State] = {}
        self._regroups = strategy.regroups(len(world.cast.workers))
        self._muster = Muster(len(world.cast.workers))
        self.mend: Callable[[], None] | None = None

    @property
    def due(self) -> bool:
        """Whether a worker waits for the next formation."""
        return self._muster.due

    @property
    def history(self) -> list[tuple[int, tuple[int, ...]]]:
        """Since which step which workers have gone in step."""
        return self._muster.history

    @property
    def missed(self) -> list[tuple[int, int]]:
        """After how many steps of the others which workers were missed."""
        return self._muster.missed

    def next_formation(self, round_: int, done: Done, *, over: bool) -> Formation:
        """Waits until all who are there have broken their step off, come or left; tells them who goes on."""
        self.read_until(lambda: self._muster.complete(self._staying()))
        if any(state.account.stopped and state.account.final for state in self.states.values()):
            self._world.stop.wish()  # who has stopped after a step that the others must take again
        formation = self._muster.form(done, self._staying(), over=over)
        for worker in formation.workers[1:]:
            self._send(self._world.cast.workers[worker], formation.message())
        return formation

    def hand_out(self, workers: dict[int, WorkerState], servers: list[State]) -> None:
        """Sends every other rank the state that it resumes from."""
        for rank, server in zip(self._world.cast.servers, servers, strict=True):
            self._control.send(rank, Message(Kind.STATE, pack_tensors(*server)))
        for worker, state in workers.items():
            self._send(self._world.cast.workers[worker], state.message())

    def read(self) -> None:
        """Takes what has arrived."""
        while self._hear(self._control.poll):
            pass

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Takes what arrives until there is enough."""
        while not enough():
            self._hear(self._control.receive)

    def wait_for_step(self, step: int) -> None:
        """Waits until every worker has handed in its state of this step, or was stopped before it."""
        self._wait_for_all(lambda account: account.step >= step or account.stopped)

    def wait_for_stop(self) -> None:
        """Waits until every worker has stopped early, or left because it was done."""
        self._wait_for_all(lambda account: account.stopped or account.final)

    def wait_for_workers(self) -> None:
        """Waits for the last words of every worker."""
        self._wait_for_all(lambda account: account.final)

    def wait_for_servers(self) -> None:
        """Waits for the last words of every server, which says them when it has been let go."""
        self.read_until(lambda: len(self.reports) == len(self._world.cast.servers))

    def ask_servers(self) -> list[State]:
        """Asks every server for its part of a checkpoint."""
        servers = self._world.cast.servers
        self._server_states = {}
        for rank in servers:
            self._world.network.send(rank, Message(Kind.CHECKPOINT))
        self.read_until(lambda: len(self._server_states) == len(servers))
        return [self._server_states[rank] for rank in servers]

    def _wait_for_all(self, done: Callable[[Account], bool]) -> None:
        """Waits until it can be said of the state of every worker that is there; lets them regroup meanwhile."""
        while not all(
            worker in self.states and done(self.states[worker].account) for worker in self.attendance.present
        ):
            if self.mend is not None and self.due:
                self.mend()
            else:
                self._hear(self._control.receive)

    def _staying(self) -> set[int]:
        """Gives the workers that are there, and have not said that they leave."""
        return {
            worker
            for worker in self.attendance.present
            if worker not in self.states or not self.states[worker].account.final
        }

    def _hear(self, get: Callable[[], tuple[int, Message] | None]) -> bool:
        """Takes a message, or the news of a loss; gives whether there was either."""
        try:
            found = get()
        except PeerLost as loss:
            if not self._world.goes_on_without(loss.rank, self._strategy):
                raise
            self._strike_off(loss.rank)
            return True
        if found is not None:
            self._take(*found)
        return found is not None

    def _strike_off(self, rank: int) -> None:
        worker = self._world.cast.workers.index(rank)
        state = self.states.get(worker)
        if worker not in self.attendance.present or (state is not None and state.account.final):
            return  # it has said all that it had to say
        self.states.pop(worker, None)
        self._muster.lose(worker)
        self._say(WorkerLost(time_s=0, worker=worker, rank=rank, step=self.attendance.lose(worker)))

    def _enter(self, rank: int, incarnation: int) -> None:
        worker = self._world.cast.workers.index(rank)
        self.states.pop(worker, None)
        self.attendance.join(worker)
        self._say(WorkerJoined(time_s=0, worker=worker, rank=rank))
        self._send(rank, self._welcome().message())
        if self._regroups:
            self._muster.enter(worker, incarnation)

    def _take(self, source: int, message: Message) -> None:
        if message.kind is Kind.JOIN:
            self._enter(source, message.version)
            return
        assert message.tensor is not None, "every other control message carries a payload"
        if message.kind is Kind.BROKEN:
            self._muster.hear(self._world.cast.workers.index(source), message)
        elif message.kind is Kind.EVENT:
            self._pass_on(from_json(unpack_json(message.tensor)))
        elif message.kind is Kind.REPORT:
            self.reports[source] = unpack_json(message.tensor)
        elif source in self._world.cast.servers:
            self._server_states[source] = unpack_tensors(message.tensor)
        else:
            state = WorkerState.from_message(message)
            self.states[state.account.worker] = state

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, WorkerProgress):
            self.attendance.note(event)
        self._world.emit(event)

    def _send(self, rank: int, message: Message) -> None:
        try:
            self._control.send(rank, message)
        except PeerLost:
            if not self._world.goes_on_without(rank, self._strategy):
                raise
