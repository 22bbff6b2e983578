"""How the leader makes the next membership view: it waits for all that are there, and says who goes on.

    worker breaks a step off ─▶ BROKEN(round, steps done) ─┐
    successor of a lost one  ─▶ JOIN ──────────────────────┼─▶ pending members: all have answered ─▶ view
    worker is lost, or has left ───────────────────────────┘

The leader does not wait for workers that have left or are about to. But a leader that has just come holds
nothing, and at the very end there may be no other worker to have it from: those who only wait for permission
to leave take part once more.

The successor of a leader knows of no view. The messages that it receives are all addressed to it, so each is
of the latest view that its worker took part in; the highest number counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.roles.leader_channel import TAG
from polyrhythm.roles.ledger import Attendance
from polyrhythm.roles.regrouping.regroup import NOTHING, Broken, Done, Formation
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy


class LeaderMessages(Protocol):
    """What making formations needs of the leader's messages.

    Attributes:
        attendance: of the workers.
    """

    attendance: Attendance

    def read(self) -> None:
        """Handles the messages that have arrived, without waiting."""

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Handles messages as they arrive, until `enough` gives true."""

    def is_final(self, worker: int) -> bool:
        """Whether a worker has sent its final state."""

    def send_if_there(self, rank: int, message: Message) -> None:
        """Sends a message, unless that rank is lost."""


class Assembly:
    """Makes formations on the leader, for all workers; see `FormationSource`.

    Args:
        world: where it is.
        strategy: says whether others listen for a leader's word between steps.
        messages: between the leader and the workers.

    Attributes:
        muster: who waits.
        left: workers that have left in good order.
    """

    def __init__(self, world: World, strategy: Strategy, messages: LeaderMessages) -> None:
        self._world = world
        self._calls = world.goes_on_without(LEADER, strategy.faults(len(world.cast.workers)))
        self._called: int | None = None
        self._messages = messages
        self.muster = Muster(len(world.cast.workers), world.incarnation)
        self.left: set[int] = set()

    def breaks_off(self, round_: int, step: int, *, wait: bool) -> bool:
        """Whether somebody is let in before this step, or before the next: all are called, so nobody loses one."""
        self._messages.read()
        if self.muster.broken_off:
            return True
        if self._called is None and self.muster.due:
            self._called = step
            if wait and self._calls:
                self._called += 1
                self._call(Message(Kind.REGROUP, version=round_, step=self._called, tag=TAG))
        return self._called is not None and step >= self._called

    def first_formation(self) -> Formation:
        """Makes the first one of a leader that has just come."""
        return self.next_formation(Broken(round=0, done=NOTHING, incarnation=self._world.incarnation))

    def next_formation(self, word: Broken) -> Formation:
        """Waits until all who are there have broken their step off, come or left; tells them who goes on."""
        self._called = None
        awaited, called = self._staying, set[int]()
        if word.done == NOTHING:
            awaited = self._there

        def complete() -> bool:
            if word.done == NOTHING and self.muster.called:
                called.update(self._call_back(but=called))
            return self.muster.complete(awaited())

        self._messages.read_until(complete)
        formation = self.muster.form(word.done, awaited())
        for worker in formation.workers[1:]:
            self._messages.send_if_there(self._world.cast.workers[worker], formation.message())
        return formation

    def _call(self, word: Message) -> None:
        for worker in self._staying() - {LEADER}:
            self._messages.send_if_there(self._world.cast.workers[worker], word)

    def _staying(self) -> set[int]:
        """Gives the workers that are there, and have not said that they leave."""
        present = self._messages.attendance.present
        return {worker for worker in present if not self._messages.is_final(worker)}

    def _there(self) -> set[int]:
        """Gives the workers that are there."""
        return self._messages.attendance.present - self.left

    def _call_back(self, but: set[int]) -> set[int]:
        """Calls those who were through with this leader's last formation, and only wait for leave to go."""
        through = {
            worker
            for worker in self.muster.formation.workers
            if worker not in but and self._messages.is_final(worker) and not self.muster.waits(worker)
        }
        for worker in through:
            word = Message(Kind.LEAD, version=self._world.incarnation, tag=TAG)
            self._messages.send_if_there(self._world.cast.workers[worker], word)
        return through


class NobodyLeft(PeerLost):
    """All who held the run's parameters are gone."""

    def __init__(self) -> None:
        super().__init__(LEADER, "mustering the workers")
        self.args = ("all workers that held the parameters are lost, with worker 0",)


class Muster:
    """Collects who waits for the next formation, and makes it.

    Args:
        workers: how many there are at first.
        incarnation: how many have led before.

    Attributes:
        formation: the present one.
        called: whether it is this leader's.
    """

    def __init__(self, workers: int, incarnation: int = 0) -> None:
        self.formation = Formation(round=0, workers=tuple(range(workers)))
        self.called = False
        self._everyone = frozenset(range(workers))
        self._waiting: dict[int, Done] = {}
        self._incarnations = {LEADER: incarnation}

    @property
    def due(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    @property
    def broken_off(self) -> bool:
        """Whether one of those waits who were taking steps."""
        return any(done != NOTHING for done in self._waiting.values())

    def on_message(self, worker: int, message: Message) -> None:
        """Notes that a worker has broken a step off; what it said of an earlier formation counts no more."""
        word = Broken.of(message)
        if word.formation is not None and word.round > self.formation.round:
            self.formation = word.formation
        elif word.round < self.formation.round and self.called and word.done != NOTHING:
            return
        self._waiting[worker] = word.done
        self._incarnations[worker] = word.incarnation

    def enter(self, worker: int, incarnation: int) -> None:
        """Notes that a successor wants to take part."""
        self._waiting[worker] = NOTHING
        self._incarnations[worker] = incarnation

    def lose(self, worker: int) -> None:
        """Strikes a worker off."""
        self._waiting.pop(worker, None)

    def waits(self, worker: int) -> bool:
        """Whether a worker waits."""
        return worker in self._waiting

    def complete(self, awaited: Collection[int]) -> bool:
        """Whether all of these wait; the leader need not say so to itself."""
        return all(worker in self._waiting for worker in awaited if worker != LEADER)

    def form(self, leader: Done, awaited: Collection[int]) -> Formation:
        """Makes the next formation of the leader and of those who wait.

        Args:
            leader: how far it has come.
            awaited: who is there and has not left.

        Raises:
            NobodyLeft: nobody has anything to go on with.
        """
        done = {worker: self._waiting.get(worker, NOTHING) for worker in awaited} | {LEADER: leader}
        most = max(done.values())
        if most == NOTHING:
            raise NobodyLeft
        workers = tuple(sorted(done))
        self.formation = Formation(
            round=self.formation.round + 1,
            workers=workers,
            incarnations=tuple(self._incarnations.get(worker, 0) for worker in workers),
            step=most.steps,
            newest=next(worker for worker in workers if done[worker] == most),
            behind=tuple(worker for worker in workers if _is_behind(done[worker], most)),
            over=most.over,
            absences=(*self.formation.absences, (most.steps, tuple(sorted(self._everyone - set(workers))))),
            missed=(*self.formation.missed, *((most.steps, worker) for worker in self._gone(workers))),
        )
        self.called = True
        self._waiting.clear()
        return self.formation

    def _gone(self, workers: Collection[int]) -> list[int]:
        """Gives those of the formation before that are there no more, or others in their place."""
        before = dict(zip(self.formation.workers, self.formation.incarnations, strict=False))
        return [
            worker
            for worker in self.formation.workers
            if worker not in workers or self._incarnations.get(worker, 0) != before.get(worker, 0)
        ]


def _is_behind(done: Done, most: Done) -> bool:
    """Whether a worker has met the others less often than the newest, at the very end among others."""
    return (done.over, done.meetings) < (most.over, most.meetings)
