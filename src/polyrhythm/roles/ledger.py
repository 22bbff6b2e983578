"""The ledger: what a run has announced so far, with the coordinator's lists of workers and servers.

    leader ── events ──▶ keeper: the launcher, or a simulation     dies
                            └── ledger ──▶ replacement: repeats and omits no announcement

The ledger is made of events alone: it holds exactly what has been announced. `Attendance` lists the present
workers and the work of failed ones; `ServerAttendance` lists the present servers and the shards that they
hold.
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
    """The coordinator's list of workers.

    Args:
        workers: number of workers.

    Attributes:
        present: indices of the members.
        lost: number of worker failures.
        joined: number of replacements that have joined.
        images_of_lost: images of failed workers in this session, as last reported.
        steps_of_lost: steps of failed workers in this session, as last reported.
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
        """Record a worker's progress report."""
        self._spoken.add(event.worker)
        self._step[event.worker] = event.step
        self._steps[event.worker] += event.steps
        self._images[event.worker] += event.images

    def lose(self, worker: int) -> int:
        """Remove a worker; return its last reported step."""
        self.present.discard(worker)
        self._spoken.discard(worker)
        self.lost += 1
        self._losses[worker] += 1
        self.images_of_lost += self._images.pop(worker, 0)
        self.steps_of_lost += self._steps.pop(worker, 0)
        return self.last_step(worker)

    def last_step(self, worker: int) -> int:
        """Return the last reported step of a worker."""
        return self._step[worker]

    def has_spoken(self, worker: int) -> bool:
        """Whether the current process of a worker has reported progress; previous processes do not count."""
        return worker in self._spoken

    def losses(self, worker: int) -> int:
        """Return the number of failures of a worker."""
        return self._losses[worker]

    def join(self, worker: int) -> None:
        """Add a replacement."""
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
    def from_json(cls, stated: dict[str, Any]) -> Attendance:
        """Rebuild it from the result of `to_json`."""
        made = cls(0)
        made.present, made._spoken = set(stated["present"]), set(stated["spoken"])
        for name in _SUMS:
            setattr(made, name, stated[name])
        for name in _COUNTED:
            getattr(made, f"_{name}").update({int(worker): count for worker, count in stated[name].items()})
        return made


@dataclass
class ServerLosses:
    """Failures and replacements of a run's servers.

    Attributes:
        lost: number of failures of servers that had all of their shards.
        joined: number of replacements that have received all of their shards.
        absent: ranks of failed servers without a complete replacement.
    """

    lost: int = 0
    joined: int = 0
    absent: set[int] = field(default_factory=set)

    def lose(self, rank: int) -> bool:
        """Mark a server as failed; return whether it was complete: a replacement may fail before it has its shards."""
        news = rank not in self.absent
        self.absent.add(rank)
        self.lost += news
        return news

    def join(self, rank: int) -> None:
        """Add a replacement that has all of its shards."""
        self.absent.discard(rank)
        self.joined += 1

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return {"lost": self.lost, "joined": self.joined, "absent": sorted(self.absent)}

    @classmethod
    def from_json(cls, stated: dict[str, Any]) -> ServerLosses:
        """Rebuild it from the result of `to_json`."""
        return cls(stated["lost"], stated["joined"], set(stated["absent"]))


class ServerAttendance:
    """The coordinator's list of servers.

    Args:
        servers: ranks of the servers, in the order of their indices.
        faults: fault policy, which assigns shards to servers.
        losses: failures so far.

    Attributes:
        losses: failures so far.
    """

    def __init__(self, servers: tuple[int, ...], faults: FaultPolicy, losses: ServerLosses) -> None:
        self.losses = losses
        self._servers = servers
        self._faults = faults

    @property
    def present(self) -> list[int]:
        """Ranks of the servers that have all of their shards."""
        return [rank for rank in self._servers if rank not in self.losses.absent]

    def lose(self, rank: int) -> bool:
        """Mark a server as failed; return whether it had all of its shards.

        Raises:
            PeerLost: no other server has one of its shards.
        """
        absent = {self._servers.index(each) for each in {rank, *self.losses.absent}}
        if not self._faults.keeps_shards(absent):
            raise PeerLost(rank, "waiting for a message from anyone")
        return self.losses.lose(rank)

    def holder(self, shard: int) -> int:
        """Return the rank of a present server that has a shard."""
        ranks = [self._servers[index] for index in self._faults.holders_of(shard)]
        return next(rank for rank in ranks if rank not in self.losses.absent)

    def shards_of(self, rank: int) -> list[int]:
        """Return the shards that a server holds."""
        return self._faults.shards_of(self._servers.index(rank))

    def name(self, rank: int) -> str:
        """Return a server's name for messages."""
        return f"server {self._servers.index(rank)} (rank {rank})"


@dataclass
class Ledger:
    """Ledger of one session of a run.

    Attributes:
        attendance: list of the workers.
        servers: failures and replacements of the servers.
        began_at_s: start of training on the keeper's clock; None: it has not started.
        earlier_s: seconds of training before this session.
        begun_epochs: progress of other numbers of workers in epochs, as `Begun` writes it.
        paused_s: seconds for which the coordinator has paused training for tests.
        tested: the newest test of this session, if there was one.
        tested_epochs: number of epochs up to which no test is due.
        saved_epochs: number of epochs up to which no checkpoint is due.
        leader_s: time of the coordinator's last progress report since training started.
        deal: state of the dealer at the start of this session, as `Dealer` writes it; empty without dynamic
            batches.
        drawn: grants and returns since then, each a unit and its `Grant`.
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
        """Return an empty ledger for this number of workers."""
        return cls(Attendance(workers))

    @property
    def began(self) -> bool:
        """Whether training has started."""
        return self.began_at_s is not None

    @property
    def begun(self) -> Begun:
        """Progress of other numbers of workers in epochs that were unfinished when this session began."""
        return Begun.from_json(self.begun_epochs)

    def note(self, event: Event, now_s: float) -> None:
        """Record an event of the run.

        Args:
            event: event of the coordinator, or forwarded by it.
            now_s: time on the keeper's clock.
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
            if event.snapshot_s is None:
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
        stated = {
            "attendance": self.attendance.to_json(),
            "servers": self.servers.to_json(),
            "tested": tested,
        }
        return values | stated

    @classmethod
    def from_json(cls, stated: dict[str, Any]) -> Ledger:
        """Rebuild it from the result of `to_json`."""
        tested = None if stated["tested"] is None else from_json(stated["tested"])
        attendance, servers = (
            Attendance.from_json(stated["attendance"]),
            ServerLosses.from_json(stated["servers"]),
        )
        drawn = [tuple(numbers) for numbers in stated["drawn"]]
        return cls(
            **stated | {"attendance": attendance, "servers": servers, "tested": tested, "drawn": drawn}
        )

    def copy(self) -> Ledger:
        """Return an independent copy."""
        return self.from_json(self.to_json())
