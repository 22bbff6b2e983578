"""What a run has said so far, as far as whoever takes up its lead must know it.

    leader ── events ──▶ keeper: the launcher, or a simulation     dies
                            └── ledger ──▶ its successor: says nothing twice, and leaves nothing out

It is made of events alone, so what it holds has been said, and what has not been said it does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from polyrhythm.data.dealing.begun import Begun
from polyrhythm.events import (
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
from polyrhythm.roles.attendance import Attendance
from polyrhythm.roles.server_attendance import ServerLosses


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

    @classmethod
    def of(cls, workers: int) -> Ledger:
        """Begins the ledger of so many workers."""
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
        """Enters what the run has just said.

        Args:
            event: of the leader, or passed on by it.
            now_s: on the keeper's clock.
        """
        if isinstance(event, RunStarted):
            self.began_at_s, self.earlier_s = now_s - event.time_s, event.earlier_s
            self.tested_epochs = self.saved_epochs = event.start_epoch
            self.begun_epochs = event.begun
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
        """Gives the ledger as a JSON-able dict."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        tested = None if self.tested is None else self.tested.to_json()
        told = {"attendance": self.attendance.to_json(), "servers": self.servers.to_json(), "tested": tested}
        return values | told

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Ledger:
        """Reads what `to_json` gave."""
        tested = None if told["tested"] is None else from_json(told["tested"])
        attendance, servers = (
            Attendance.from_json(told["attendance"]),
            ServerLosses.from_json(told["servers"]),
        )
        return cls(**told | {"attendance": attendance, "servers": servers, "tested": tested})

    def copy(self) -> Ledger:
        """Gives one that what is said from now on does not change."""
        return self.from_json(self.to_json())
