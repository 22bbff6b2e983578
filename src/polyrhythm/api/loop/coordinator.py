"""What a worker in a user's own loop needs of the leader: the leader itself, or its stand-in over messages.

The leader lets workers regroup, admits successors, and makes the final model, which all workers receive, so
that any of them may save it.

    worker ── BROKEN ──────────▶ leader: calls the workers that wait in the store ── BROKEN ──▶ they break off as well
    successor ── JOIN ─────────▶         in lockstep it waits to be admitted until an epoch begins
    worker ── its last state ──▶         once all have come: the final model, with which they may leave
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_tensors
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event, WorkerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leader_channel import TAG, LeaderChannel
from polyrhythm.roles.leading.control_plane import Correspondence
from polyrhythm.roles.leading.taking_over import inherit_untrained
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.regrouping.regroup import Broken, Formation, FormationSource, Regroup, RemoteFormations
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


class LoopCoordinator(Protocol):
    """Lets a worker take part in the run; implemented by `LoopLeader` and `LoopMember`.

    Attributes:
        reform: regroups with whoever is there, between two steps; set where workers regroup.
        regroup: of this worker, where workers regroup.
    """

    reform: Callable[[], None]
    regroup: Regroup | None

    @property
    def formations(self) -> FormationSource:
        """How this worker gets the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits for others."""

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""

    def introduce(self, replica: Replica) -> None:
        """Makes ready what a new leader would need of this worker."""

    def read(self) -> None:
        """Handles the messages that have arrived, without waiting."""

    def attend(self) -> None:
        """Handles the messages that have arrived while this worker waits for others; regroups if they do."""

    def took(self, taken: int, of: int) -> None:
        """Notes that this worker has taken `taken` of the `of` batches of its share of an epoch."""

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """Ends this worker's part; returns when the replica holds the run's final model.

        Returns:
            On the leader, how many gradients servers have applied at which staleness.
        """


_VECTOR, _BUFFER = "vector", "buffer."


@dataclass(frozen=True)
class FinalModel:
    """Parameters and buffers.

    Attributes:
        vector: `(size,)`, the parameters.
        buffers: by name.
    """

    vector: Tensor
    buffers: dict[str, Tensor]

    @classmethod
    def made_of(cls, vector: Tensor, buffers: Sequence[dict[str, Tensor]]) -> FinalModel:
        """Makes it of worker 0's parameters.

        Batch-norm statistics, which each worker has kept on its own, are averaged; buffers that are equal everywhere
        keep their bits, and counters are worker 0's.

        Args:
            vector: `(size,)`, worker 0's.
            buffers: of all workers, worker 0's first.
        """
        first = buffers[0]
        means = {name: _mean([each[name] for each in buffers]) for name in first}
        return cls(vector.detach().cpu(), means)

    @classmethod
    def of(cls, message: Message) -> FinalModel:
        """Reads what `message` wrote."""
        assert message.tensor is not None, "a model has parameters"
        tensors, _ = unpack_tensors(message.tensor)
        buffers = {
            name.removeprefix(_BUFFER): value for name, value in tensors.items() if name.startswith(_BUFFER)
        }
        return cls(tensors[_VECTOR], buffers)

    def message(self, tag: int) -> Message:
        """Packs it to be sent, as the word that lets a worker leave."""
        named = {_VECTOR: self.vector} | {_BUFFER + name: value for name, value in self.buffers.items()}
        return Message(Kind.LEAVE, pack_tensors(named, {}), tag=tag)

    def give(self, replica: Replica) -> None:
        """Overwrites the model of a replica."""
        replica.flat.vector.copy_(self.vector)
        for name, value in replica.buffers.items():
            value.copy_(self.buffers[name])


def _mean(values: list[Tensor]) -> Tensor:
    """Averages values that are no whole numbers; not the plain mean, which would not give equal ones back."""
    first = values[0]
    if not first.is_floating_point():
        return first
    away = [torch.where(value == first, torch.zeros_like(value), value - first) for value in values[1:]]
    return first + sum(away, torch.zeros_like(first)) / len(values)


_REPORT_EVERY_S = 0.5
LOOP_TAG = 4
"""Tag of the leader's requests to regroup."""


class LoopMember:
    """The coordinator of a worker that does not lead; see `LoopCoordinator`.

    Args:
        world: where this rank is.
        strategy: how the workers share the work.
        reports_batches: whether the leader must be sent how many batches this worker has taken.

    Attributes:
        channel: to whoever leads.
        reform: regroups with whoever is there, between two steps; set where workers regroup.
        regroup: of this worker, where workers regroup.
    """

    def __init__(self, world: World, strategy: Strategy, *, reports_batches: bool) -> None:
        self.reform: Callable[[], None] = lambda: None
        self.regroup: Regroup | None = None
        self._clock = world.clock
        self._incarnation = world.incarnation
        self._reports_batches = reports_batches
        self._reported_at_s = -_REPORT_EVERY_S
        self._replica: Replica | None = None
        self._newest: list[Message] = []
        self.channel = LeaderChannel(world, strategy)
        self.formations = RemoteFormations(self.channel, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits for others."""
        self.regroup = regroup

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, where the run survives the loss of one."""
        return self.channel.recovers_from(loss)

    def introduce(self, replica: Replica) -> None:
        """Makes ready what a new leader would need of this worker."""
        self._replica = replica
        self.channel.introduction = self._introduction

    def read(self) -> None:
        """Checks for a new leader, where workers do not find it by regrouping."""
        if self.regroup is None:
            self.channel.check()

    def attend(self) -> None:
        """Handles what the leader has sent; regroups if it asks for that, is lost, or was replaced."""
        while (word := self.channel.poll(LOOP_TAG)) is not None:
            # A request of an earlier round is over: this worker has regrouped since.
            if self.regroup is not None and word.version == self.regroup.round:
                self.reform()
        self.channel.check()
        if self.regroup is not None and (self.channel.leader_lost or self._leader_changed):
            self.reform()

    def took(self, taken: int, of: int) -> None:
        """Reports to the leader now and then, and at an epoch's beginning and end."""
        now_s = self._clock.now()
        if not self._reports_batches or not (
            taken in (0, of) or now_s - self._reported_at_s >= _REPORT_EVERY_S
        ):
            return
        self._reported_at_s = now_s
        self.channel.send(Message(Kind.TAKEN, step=taken, version=of))

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """Sends the last state, and waits for the final model."""
        message = state.message()
        self._newest = [message] if self.channel.survives_leader else []
        self.channel.send(message)
        if self.regroup is None:
            last = self.channel.await_last_word()
        else:
            if self._leader_changed:  # it was said while there was nothing to hand on
                self.regroup.reform()
            last = self.channel.await_last_word(self.regroup.reform)
        FinalModel.of(last).give(replica)
        return Counter()

    @property
    def _leader_changed(self) -> bool:
        """Whether another leads than the one that made this worker's formation."""
        return self.regroup is not None and self.channel.leader > self.regroup.leader

    def _introduction(self) -> list[Message]:
        assert self._replica is not None, "it has been introduced"
        untrained = pack_tensors(self._replica.untrained, {})
        here = Message(Kind.LEAD, untrained, self._incarnation, weight=float(len(self._newest)))
        return [here, *self._newest]


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
        self._regroups = strategy.faults(len(world.cast.workers)).regroups
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
    traits = strategy.traits(workers)
    return traits.lockstep and traits.exchange_every == 1
