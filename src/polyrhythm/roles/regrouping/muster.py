"""The leader's list of those who wait for the next formation.

    worker breaks a step off ─▶ BROKEN(round, steps done) ─┐
    successor of a lost one  ─▶ JOIN ──────────────────────┼─▶ muster: all that are there have said so ─▶ formation
    worker is lost, or has left ───────────────────────────┘

The successor of a leader knows of no formation. The words that it hears are all said to it, so each is of the latest
formation that its worker took part in; the highest counts.
"""

from __future__ import annotations

from collections.abc import Collection

from polyrhythm.communication.message import Message
from polyrhythm.errors import PeerLost
from polyrhythm.roles.regrouping.formation import NOTHING, Broken, Done, Formation
from polyrhythm.roles.world import LEADER


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
