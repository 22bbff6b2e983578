"""Watching a run from outside: tells invariants what is sent, handled and updated; one that is broken ends it.

What a strategy makes is wrapped: its parts are called as ever, and do not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Message
from polyrhythm.communication.transports.simulated.rank import Parcel
from polyrhythm.simulation.scene import Scene
from polyrhythm.strategies.parameter_server.replication.replicated_server import Entry
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Reassembled, Step, WorkerPart, WorkerSetting
from polyrhythm.verification.invariant import Delivered, Ended, Handled, Invariant, Regrouped, Stepped
from polyrhythm.verification.servers import Agreement


class Watch:
    """Tells invariants what happens.

    Args:
        invariants: are told everything, in order.

    Attributes:
        steps: by rank, how many each worker has done.
    """

    def __init__(self, invariants: Sequence[Invariant]) -> None:
        told = [entry for entry in invariants if type(entry).delivered is not Invariant.delivered]
        self._on_delivered = [entry.delivered for entry in told]
        told = [entry for entry in invariants if type(entry).handled is not Invariant.handled]
        self._on_handled = [entry.handled for entry in told]
        told = [entry for entry in invariants if type(entry).stepped is not Invariant.stepped]
        self._on_stepped = [entry.stepped for entry in told]
        told = [entry for entry in invariants if type(entry).regrouped is not Invariant.regrouped]
        self._on_regrouped = [entry.regrouped for entry in told]
        self._on_end = [entry.ended for entry in invariants]
        self._scene: Scene | None = None
        self._agreement: Agreement | None = None
        self.steps: dict[int, int] = {}

    def watched(self, strategy: Strategy) -> Strategy:
        """Gives the strategy with parts that are watched."""
        return cast(Strategy, _WatchedStrategy(strategy, self))

    def attend(self, scene: Scene) -> None:
        """Watches the links of a scene, whose clock counts."""
        self._scene = scene
        scene.links.on_arrival = self._delivered

    def ended(self, steps: int) -> None:
        """Tells that the run is over, in which every worker had to take so many steps."""
        survivors = tuple(rank for rank in self._now.cast.workers if self._now.ranks[rank].alive)
        incarnations = {rank: self.incarnation(rank) for rank in survivors}
        event = Ended(self._now.time.now(), steps, survivors, incarnations)
        for tell in self._on_end:
            tell(event)

    def handled(self, event: Handled) -> None:
        """Tells that a server part took something."""
        for tell in self._on_handled:
            tell(event)

    def taken(self, entry: Entry) -> None:
        """Tells that a shard has taken an entry that can be lost no more; of one on two servers only once."""
        if self._agreement is None:
            self._agreement = Agreement(self._now.cast)
        if self._agreement.is_new(entry, self.now_s):
            server = self._now.cast.servers[entry.shard]
            what = entry.message, entry.replies, entry.version_before, entry.version, entry.applied
            self.handled(Handled(self.now_s, server, entry.source, *what))

    def stepped(self, event: Stepped) -> None:
        """Tells that a worker's step is over."""
        for tell in self._on_stepped:
            tell(event)

    def regrouped(self, event: Regrouped) -> None:
        """Tells that a worker goes on with others."""
        for tell in self._on_regrouped:
            tell(event)

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._now.time.now()

    def incarnation(self, rank: int) -> int:
        """How many have had a rank's number before the one that has it now."""
        return self._now.ranks[rank].incarnation

    @property
    def _now(self) -> Scene:
        assert self._scene is not None, "a watch attends a scene before it is played"
        return self._scene

    def _delivered(self, parcel: Parcel) -> None:
        source, to = parcel.source, parcel.to
        event = Delivered(
            self.now_s, source.rank, source.incarnation, to.rank, to.incarnation, parcel.message
        )
        for tell in self._on_delivered:
            tell(event)


class _Wrapped:
    """Passes on whatever is not watched, whatever it may be."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __str__(self) -> str:
        return str(self._inner)


class _WatchedStrategy(_Wrapped):
    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return cast(WorkerPart, _WatchedWorker(self._inner.worker(setting), self._watch, setting))

    def server(self, setting: ServerSetting) -> ServerPart:
        rank = setting.cast.servers[setting.index]
        part = self._inner.server(setting)
        if hasattr(part, "watch"):  # it has several shards, and tells of each itself
            part.watch(self._watch.taken)
            return cast(ServerPart, part)
        return cast(ServerPart, _WatchedServer(part, self._watch, rank))


class _WatchedWorker(_Wrapped):
    def __init__(self, inner: WorkerPart, watch: Watch, setting: WorkerSetting) -> None:
        super().__init__(inner, watch)
        self._setting = setting
        self._regrouped: tuple[int, ...] | None = None
        self._formation = 0

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        self._regrouped = tuple(self._setting.cast.workers[member] for member in members)
        self._formation = getattr(workers, "context", 0)
        there = {rank: self._watch.incarnation(rank) for rank in self._regrouped}
        self._inner.regroup(workers, members)
        steps = {rank: self._watch.steps.get(rank, 0) for rank in there}
        rank, vector = self._setting.network.rank, self._setting.flat.vector
        self._watch.regrouped(Regrouped(self._watch.now_s, rank, vector, there, steps))

    def reassemble(self, *, enters: bool) -> Reassembled:
        found: Reassembled = self._inner.reassemble(enters=enters)
        rank, vector = self._setting.network.rank, self._setting.flat.vector
        members = (rank,) if found.over else tuple(self._setting.cast.workers[one] for one in found.there)
        self._regrouped, self._formation = members, found.round
        there = {member: self._watch.incarnation(member) for member in members}
        self._watch.steps[rank] = found.step
        steps = dict.fromkeys(there, found.step)
        self._watch.regrouped(Regrouped(self._watch.now_s, rank, vector, there, steps))
        return found

    def take_over(self, newest: State, done: int, step: int) -> int:
        taken: int = self._inner.take_over(newest, done, step)
        self._watch.steps[self._setting.network.rank] = taken
        return taken

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        stop: bool = self._inner.gradients_ready(step, learning_rate)
        setting = self._setting
        rank, vector = setting.network.rank, setting.flat.vector
        regrouped = None
        if self._regrouped is not None:
            regrouped = {member: self._watch.incarnation(member) for member in self._regrouped}
        incarnation = self._watch.incarnation(rank)
        self._watch.steps[rank] = step.number + 1
        now_s = self._watch.now_s
        self._watch.stepped(
            Stepped(now_s, rank, step.number, vector, regrouped, incarnation, self._formation)
        )
        return stop


class _WatchedServer(_Wrapped):
    def __init__(self, inner: ServerPart, watch: Watch, rank: int) -> None:
        super().__init__(inner, watch)
        self._rank = rank

    def on_message(self, source: int, message: Message) -> list[tuple[int, Message]]:
        return self._observed(source, message)

    def on_loss(self, rank: int) -> list[tuple[int, Message]]:
        return self._observed(rank, None)

    def _observed(self, source: int, message: Message | None) -> list[tuple[int, Message]]:
        inner: ServerPart = self._inner
        version, staleness = inner.version, Counter(inner.staleness)
        replies = inner.on_loss(source) if message is None else inner.on_message(source, message)
        applied = inner.staleness - staleness
        now_s = self._watch.now_s
        self._watch.handled(
            Handled(now_s, self._rank, source, message, replies, version, inner.version, applied)
        )
        return replies
