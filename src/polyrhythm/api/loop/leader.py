"""The leader of a user's own loop: it has workers regroup, lets successors in, and makes the final model.

worker ── BROKEN ──────────▶ leader: calls those who wait in the store ── BROKEN ──▶ they break off as well
successor ── JOIN ─────────▶         where workers go in step it waits at the door until an epoch begins
worker ── its last state ──▶         once all have come: the final model, with which they may leave
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from polyrhythm.api.loop.final_model import FinalModel
from polyrhythm.api.loop.member import LOOP_TAG
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event, WorkerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leader_channel import TAG
from polyrhythm.roles.leading.correspondence import Correspondence
from polyrhythm.roles.leading.taking_over import inherit_untrained
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.regrouping.formation import Broken, Formation
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


class LoopLeader:
    """The coordinator of rank 0; see `LoopCoordinator`.

    Args:
        world: where this rank is.
        strategy: says which losses the run survives.
        welcome: makes what a successor is given.
        tell: is told of losses, and of what servers say.
        ledger: who is there, where another has led before.

    Attributes:
        reform: goes on with whoever is there, between two steps; set where workers regroup.
        regroup: of this worker, where workers regroup.
        over: told when all have come to the end, and nobody else can come to it.
        whole: is told of the rank and incarnation of a successor that has all shards of a lost server.
        knows: whether it can tell how many batches each worker has taken, without having been told.
        unseen: of lost workers, their indices with the batches that they had not taken of how many.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        welcome: Callable[[], Welcome],
        tell: Callable[[Event], None],
        ledger: Ledger | None = None,
    ) -> None:
        self.reform: Callable[[], None] = lambda: None
        self.regroup: Regroup | None = None
        self.over: Callable[[], None] = lambda: None
        self.whole: Callable[[int, int], None] = lambda rank, incarnation: None
        self.unseen: list[tuple[int, int, int]] = []
        self._world = world
        self._tell = tell
        self.knows = meets_every_step(strategy, len(world.cast.workers))
        self._regroups = strategy.regroups(len(world.cast.workers))
        known = ledger or Ledger.of(len(world.cast.workers))
        self._others = Correspondence(replace(world, emit=tell), strategy, self._hear_event, welcome, known)
        self._others.takes = self._take
        self._control = world.control()
        self._taken: dict[int, tuple[int, int]] = {}
        self._at_door: dict[int, int] = {}

    @property
    def formations(self) -> LoopLeader:
        """It makes the formations."""
        return self

    @property
    def due(self) -> bool:
        """Whether a worker waits for the next formation."""
        return self._others.assembly.muster.due

    def breaks_off(self, round_: int, step: int, *, wait: bool) -> bool:
        """Whether a worker waits for the next formation; a loop of one's own stops between its steps as it is."""
        return self.due

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for them."""
        self.regroup = regroup
        self._others.reform = regroup.reform

    def first_formation(self) -> Formation:
        """Makes the first one of a leader that has just come."""
        return self._others.assembly.first_formation()

    def next_formation(self, word: Broken) -> Formation:
        """Calls those who wait for the leader, and makes the next formation."""
        call = Message(Kind.BROKEN, version=word.round, tag=LOOP_TAG)
        for worker in self._others.attendance.present - {LEADER}:
            self._send(worker, call)
        return self._others.assembly.next_formation(word)

    def recovers_from(self, loss: PeerLost) -> bool:
        """Never: this is the leader."""
        return False

    def introduce(self, replica: Replica) -> None:
        """Nobody asks the leader."""

    def take_up(self, replica: Replica) -> None:
        """Says that this worker leads from now on; takes from the others what nobody trains."""
        self._others.take_over()
        inherit_untrained(self._others, replica)

    def read(self) -> None:
        """Takes what has arrived: it must not pile up, and a successor waits for an answer."""
        self._others.read()

    def attend(self) -> None:
        """Takes what has arrived; regroups if somebody waits for that."""
        self.read()
        if self.regroup is not None and self.due:
            self.reform()

    def took(self, taken: int, of: int) -> None:
        """Notes it."""
        self._taken[LEADER] = taken, of

    def is_there(self, worker: int) -> bool:
        """Whether a worker, or a successor of it, takes part."""
        return worker in self._others.attendance.present

    def admit(self, workers: Iterable[int], gone: Callable[[int], bool]) -> bool:
        """Lets successors in that wait at the door, or are about to; gives whether there was one.

        Args:
            workers: their indices.
            gone: whether one has died meanwhile.
        """
        let_in = False
        for worker in workers:
            rank = self._world.cast.workers[worker]
            while rank not in self._at_door and not gone(worker):
                self.read()
                self._world.clock.sleep(0.002)
            if rank in self._at_door:
                self._others.enter(rank, self._at_door.pop(rank))
                let_in = True
        return let_in

    def ask_servers(self) -> list[State]:
        """Asks for the state of every shard."""
        return self._others.servers.ask()

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """Waits for the last states of all who are there, gives all the final model, and lets the servers go."""
        self._others.workers.states[LEADER] = state
        self._others.wait_for_workers()
        self.over()
        replica.part.let_go()
        states = self._others.workers.states
        model = FinalModel.made_of(replica.flat.vector, [states[worker].buffers for worker in sorted(states)])
        model.give(replica)
        message = model.message(TAG)
        for worker in sorted(states)[1:]:
            self._send(worker, message)
        self._others.servers.wait()
        staleness: Counter[int] = Counter()
        for report in self._others.servers.reports.values():
            staleness.update({int(age): count for age, count in report["staleness"].items()})
        return staleness

    def _take(self, source: int, message: Message) -> bool:
        if message.kind is Kind.JOIN and self._regroups and source in self._world.cast.workers:
            self._at_door[source] = message.version
            return True
        if message.kind is Kind.JOIN and source in self._world.cast.servers:
            self.whole(source, message.version)
        if message.kind is not Kind.TAKEN:
            return False
        self._taken[self._world.cast.workers.index(source)] = message.step, message.version
        return True

    def _hear_event(self, event: Event) -> None:
        """Notes what a lost worker had not taken of its share, as it said last, or as all have."""
        if isinstance(event, WorkerLost):
            whose = LEADER if self.knows else event.worker
            taken, of = self._taken.get(whose, (0, 0))
            if taken < of:
                self.unseen.append((event.worker, of - taken, of))
        self._tell(event)

    def _send(self, worker: int, message: Message) -> None:
        with suppress(PeerLost):  # as is heard where something is received from it
            self._control.send(self._world.cast.workers[worker], message)


def meets_every_step(strategy: Strategy, workers: int) -> bool:
    """Whether all workers take their batches together, so that who leads knows how many each has taken."""
    return strategy.in_step(workers) and strategy.round_steps(workers) == 1
