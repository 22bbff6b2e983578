"""Who goes in step now, and the leader's list from which that follows.

    worker breaks a step off ─▶ BROKEN(round, steps done) ─┐
    successor of a lost one  ─▶ JOIN ──────────────────────┼─▶ muster: all that are there have said so ─▶ formation
    worker is lost, or has left ───────────────────────────┘

Whoever has met the others waits for all of them at the next meeting, which is every step or seldom. So what a meeting
came to is held by somebody, who hands it on, or by nobody, and they meet again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message, pack_json, unpack_json
from polyrhythm.roles.world import LEADER

_TAG = 2
"""Nothing else that the leader sends a worker can be taken for a formation."""


@dataclass(frozen=True, order=True)
class Done:
    """How far a worker has come.

    Attributes:
        meetings: of all workers that it has been at; see `WorkerPart.meetings`.
        steps: that it has done.
    """

    meetings: int
    steps: int


NOTHING_DONE = -1
"""Steps of a worker that holds no parameters yet, and meetings."""
_NOTHING = Done(NOTHING_DONE, NOTHING_DONE)


@dataclass(frozen=True, kw_only=True)
class Formation:
    """The workers that go in step from now on.

    Attributes:
        round: how many formations there have been before.
        workers: their indices among all workers of the run, in order; worker 0 leads.
        incarnations: how many have had each one's number before it.
        step: steps that the newest has done.
        newest: the worker that has come furthest, and hands on what it holds.
        behind: those who have not met the others so often.
        over: whether nothing is left to do but to leave.
    """

    round: int
    workers: tuple[int, ...]
    incarnations: tuple[int, ...] = ()
    step: int = 0
    newest: int = 0
    behind: tuple[int, ...] = ()
    over: bool = False

    def message(self) -> Message:
        """Packs it to be sent."""
        return Message(Kind.REGROUP, pack_json(asdict(self)), tag=_TAG)

    @classmethod
    def receive(cls, control: Communicator) -> Formation:
        """Waits for the leader's word.

        Raises:
            PeerLost: the leader is gone.
        """
        message = control.receive(LEADER, _TAG)[1]
        assert message.tensor is not None, "a formation travels as text"
        told = unpack_json(message.tensor)
        return cls(**told | {name: tuple(told[name]) for name in ("workers", "incarnations", "behind")})


def broken_off(round_: int, done: Done) -> Message:
    """Tells the leader that a step cannot be finished.

    Args:
        round_: of the formation that broke.
        done: how far this worker has come.
    """
    return Message(Kind.BROKEN, pack_json({"round": round_, "meetings": done.meetings, "steps": done.steps}))


class Muster:
    """The leader's list of those who wait for the next formation.

    Args:
        workers: how many there are at first.

    Attributes:
        formation: the present one.
        history: since which step which workers have gone in step, oldest first.
        missed: after how many steps of the others which workers were missed, be they replaced or not.
    """

    def __init__(self, workers: int) -> None:
        self.formation = Formation(round=0, workers=tuple(range(workers)))
        self.history = [(0, self.formation.workers)]
        self.missed: list[tuple[int, int]] = []
        self._waiting: dict[int, Done] = {}
        self._incarnations: dict[int, int] = {}

    @property
    def due(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def hear(self, worker: int, message: Message) -> None:
        """Notes that a worker has broken a step off; what it said of an earlier formation counts no more."""
        assert message.tensor is not None, "a worker says how far it has come"
        told = unpack_json(message.tensor)
        if told["round"] == self.formation.round:
            self._waiting[worker] = Done(int(told["meetings"]), int(told["steps"]))

    def enter(self, worker: int, incarnation: int) -> None:
        """Notes that a successor wants to take part."""
        self._waiting[worker] = _NOTHING
        self._incarnations[worker] = incarnation

    def lose(self, worker: int) -> None:
        """Strikes a worker off."""
        self._waiting.pop(worker, None)

    def complete(self, awaited: Collection[int]) -> bool:
        """Whether all of these wait; the leader need not say so to itself."""
        return all(worker in self._waiting for worker in awaited if worker != LEADER)

    def form(self, leader: Done, awaited: Collection[int], *, over: bool) -> Formation:
        """Makes the next formation of the leader and of those who wait.

        Args:
            leader: how far it has come.
            awaited: who is there and has not left.
            over: whether the leader has done all that there was to do.
        """
        done = {worker: self._waiting.get(worker, _NOTHING) for worker in awaited} | {LEADER: leader}
        most = max(done.values())
        workers = tuple(sorted(done))
        before = dict(zip(self.formation.workers, self.formation.incarnations, strict=False))
        replaced = {worker for worker in done if self._incarnations.get(worker, 0) != before.get(worker, 0)}
        gone = [worker for worker in self.formation.workers if worker not in done or worker in replaced]
        self.missed += [(most.steps, worker) for worker in gone]
        self.formation = Formation(
            round=self.formation.round + 1,
            workers=workers,
            incarnations=tuple(self._incarnations.get(worker, 0) for worker in workers),
            step=most.steps,
            newest=next(worker for worker in workers if done[worker] == most),
            behind=tuple(worker for worker in workers if done[worker].meetings < most.meetings),
            over=over,
        )
        self.history.append((most.steps, workers))
        self._waiting.clear()
        return self.formation
