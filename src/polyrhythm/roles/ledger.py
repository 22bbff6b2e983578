"""The ledger: what a run has announced so far, with the leader's lists of workers and servers.

    leader ── events ──▶ keeper: the launcher, or a simulation     dies
                            └── ledger ──▶ its successor: announces nothing twice, and leaves nothing out

The ledger is made of events alone: it holds exactly what has been announced. `Attendance` lists the workers
that are there, and what lost workers had done; `ServerAttendance` lists the servers that are there, and the
shards that they can hand in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from polyrhythm.data.dealing import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.events import (
    BatchesDrawn,
    CheckpointSaved,
    Evaluated,
    Event,
    RunStarted,
    ServerJoined,
    ServerLost,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
    from_json,
)
from polyrhythm.strategies.fault_policy import FaultPolicy

_SUMS = ("lost", "joined", "images_of_lost", "steps_of_lost")
_COUNTED = ("losses", "step", "images", "steps")


class Attendance:
    """The leader's list of workers.

    Args:
        workers: how many there are.

    Attributes:
        present: the indices of those who take part.
        lost: how often a worker was lost.
        joined: how often a successor came.
        images_of_lost: seen by lost workers in this session, as far as they had said so.
        steps_of_lost: the same of their steps.
    """

    def __init__(self, workers: int) -> None:
        self.present = set(range(workers))
        self.lost = 0
        self.joined = 0
        self.images_of_lost = 0
        self.steps_of_lost = 0
        self._losses: Counter[int] = Counter()
        self._spoken: set[int] = set()
        self._step: Counter[int] = Counter()
        self._images: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()

    def note(self, event: WorkerProgress) -> None:
        """Note what a worker says of itself."""
        self._spoken.add(event.worker)
        self._step[event.worker] = event.step
        self._steps[event.worker] += event.steps
        self._images[event.worker] += event.images

    def lose(self, worker: int) -> int:
        """Strike a worker off; return the step after which it was last heard of."""
        self.present.discard(worker)
        self._spoken.discard(worker)
        self.lost += 1
        self._losses[worker] += 1
        self.images_of_lost += self._images.pop(worker, 0)
        self.steps_of_lost += self._steps.pop(worker, 0)
        return self.last_step(worker)

    def last_step(self, worker: int) -> int:
        """Return the steps that a worker was last heard to have done."""
        return self._step[worker]

    def has_spoken(self, worker: int) -> bool:
        """Whether the process that is a worker now has said how far it has come; if not, one before it may have."""
        return worker in self._spoken

    def losses(self, worker: int) -> int:
        """Return how often a worker was lost."""
        return self._losses[worker]

    def join(self, worker: int) -> None:
        """Enter a successor."""
        self.present.add(worker)
        self.joined += 1

    def to_json(self) -> dict[str, Any]:
        """Return the list as a JSON-able dict."""
        counted = {name: dict(getattr(self, f"_{name}")) for name in _COUNTED}
        present, spoken = sorted(self.present), sorted(self._spoken)
        return {
            "present": present,
            "spoken": spoken,
            **{name: getattr(self, name) for name in _SUMS},
            **counted,
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Attendance:
        """Read what `to_json` gave."""
        made = cls(0)
        made.present, made._spoken = set(told["present"]), set(told["spoken"])
        for name in _SUMS:
            setattr(made, name, told[name])
        for name in _COUNTED:
            getattr(made, f"_{name}").update({int(worker): count for worker, count in told[name].items()})
        return made


@dataclass
class ServerLosses:
    """What has become of a run's servers.

    Attributes:
        lost: how often a server was lost that had all of its shards.
        joined: how often a successor has got all of its shards.
        absent: ranks of those who are lost, and have no successor with all of its shards.
    """

    lost: int = 0
    joined: int = 0
    absent: set[int] = field(default_factory=set)

    def lose(self, rank: int) -> bool:
        """Strike a server off; return whether it was there: a successor may be lost before it has its shards."""
        news = rank not in self.absent
        self.absent.add(rank)
        self.lost += news
        return news

    def join(self, rank: int) -> None:
        """Enter a successor that has all of its shards."""
        self.absent.discard(rank)
        self.joined += 1

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return {"lost": self.lost, "joined": self.joined, "absent": sorted(self.absent)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> ServerLosses:
        """Read what `to_json` gave."""
        return cls(told["lost"], told["joined"], set(told["absent"]))


class ServerAttendance:
    """The leader's list of servers.

    Args:
        servers: their ranks, in the order of their indices.
        faults: says which shards each holds.
        losses: so far.

    Attributes:
        losses: so far.
    """

    def __init__(self, servers: tuple[int, ...], faults: FaultPolicy, losses: ServerLosses) -> None:
        self.losses = losses
        self._servers = servers
        self._faults = faults

    @property
    def present(self) -> list[int]:
        """Ranks of those who are there, with all of their shards."""
        return [rank for rank in self._servers if rank not in self.losses.absent]

    def lose(self, rank: int) -> bool:
        """Strike a server off; return whether it was there with all of its shards.

        Raises:
            PeerLost: nobody else has one of its shards.
        """
        absent = {self._servers.index(each) for each in {rank, *self.losses.absent}}
        if not self._faults.keeps_shards(absent):
            raise PeerLost(rank, "waiting for a message from anyone")
        return self.losses.lose(rank)

    def holder(self, shard: int) -> int:
        """Return the rank of a server that is there and has a shard."""
        ranks = [self._servers[index] for index in self._faults.holders_of(shard)]
        return next(rank for rank in ranks if rank not in self.losses.absent)

    def shards_of(self, rank: int) -> list[int]:
        """Return the shards that a server holds."""
        return self._faults.shards_of(self._servers.index(rank))

    def name(self, rank: int) -> str:
        """Name a server for people."""
        return f"server {self._servers.index(rank)} (rank {rank})"


@dataclass
class Ledger:
    """One session's of a run.

    Attributes:
        attendance: of the workers.
        servers: what has become of them.
        began_at_s: when training started, on the keeper's clock; None: it has not.
        earlier_s: seconds of training before this session.
        begun_epochs: what other numbers of workers did of epochs, as `Begun` writes it.
        paused_s: for how long the leader was away from training to test, of those since.
        tested: the newest test, if there was one in this session.
        tested_epochs: after so many epochs there is no test to be made up for.
        saved_epochs: the same of checkpoints.
        leader_s: when the leader last spoke of its own steps, since training started.
        deal: the deal at the start of this session, as `Dealer` writes it; empty where nothing is drawn.
        drawn: what has been drawn since then, and given back: a unit and its `Grant` each.
    """

    attendance: Attendance
    servers: ServerLosses = field(default_factory=ServerLosses)
    began_at_s: float | None = None
    earlier_s: float = 0.0
    begun_epochs: dict[str, Any] = field(default_factory=dict)
    paused_s: float = 0.0
    tested: Evaluated | None = None
    tested_epochs: int = 0
    saved_epochs: int = 0
    leader_s: float = 0.0
    deal: dict[str, Any] = field(default_factory=dict)
    drawn: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, workers: int) -> Ledger:
        """Begin the ledger of so many workers."""
        return cls(Attendance(workers))

    @property
    def began(self) -> bool:
        """Whether training has started."""
        return self.began_at_s is not None

    @property
    def begun(self) -> Begun:
        """What other numbers of workers did of epochs that were not over when this session began."""
        return Begun.from_json(self.begun_epochs)

    def note(self, event: Event, now_s: float) -> None:
        """Enter what the run has just said.

        Args:
            event: of the leader, or passed on by it.
            now_s: on the keeper's clock.
        """
        if isinstance(event, RunStarted):
            self.began_at_s, self.earlier_s = now_s - event.time_s, event.earlier_s
            self.tested_epochs = self.saved_epochs = event.start_epoch
            self.begun_epochs = event.begun
            self.deal = event.deal
        elif isinstance(event, BatchesDrawn):
            grant = (
                event.step,
                event.epoch,
                event.start,
                event.stop,
                event.batches,
                event.reached,
                event.until,
            )
            self.drawn.append((event.unit, *grant))
        elif isinstance(event, WorkerProgress):
            self.attendance.note(event)
            if event.worker == 0:
                self.leader_s = event.time_s
        elif isinstance(event, Evaluated):
            self.tested, self.tested_epochs = event, event.epoch
            self.paused_s += max(0.0, event.time_s - self.leader_s)
        elif isinstance(event, CheckpointSaved):
            self.saved_epochs = event.epoch
        elif isinstance(event, WorkerLost):
            self.attendance.lose(event.worker)
        elif isinstance(event, WorkerJoined):
            self.attendance.join(event.worker)
        elif isinstance(event, ServerLost):
            self.servers.lose(event.rank)
        elif isinstance(event, ServerJoined):
            self.servers.join(event.rank)

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as a JSON-able dict."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        tested = None if self.tested is None else self.tested.to_json()
        told = {"attendance": self.attendance.to_json(), "servers": self.servers.to_json(), "tested": tested}
        return values | told

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Ledger:
        """Read what `to_json` gave."""
        tested = None if told["tested"] is None else from_json(told["tested"])
        attendance, servers = (
            Attendance.from_json(told["attendance"]),
            ServerLosses.from_json(told["servers"]),
        )
        drawn = [tuple(numbers) for numbers in told["drawn"]]
        return cls(**told | {"attendance": attendance, "servers": servers, "tested": tested, "drawn": drawn})

    def copy(self) -> Ledger:
        """Return one that what is said from now on does not change."""
        return self.from_json(self.to_json())
