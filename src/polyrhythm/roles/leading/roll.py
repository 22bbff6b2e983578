"""The leader's roll of workers: who is there, and what each has handed in last."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.events import Event, WorkerJoined, WorkerLost
from polyrhythm.roles.attendance import Attendance
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leading.stragglers import Stragglers


class Roll:
    """Records the workers' latest states, and announces losses and successors.

    Args:
        ranks: the workers', by their indices.
        attendance: of the workers.
        say: takes the leader's own events, whose times it sets.

    Attributes:
        states: the latest of every worker that is there.
        stragglers: among the workers.
    """

    def __init__(self, ranks: tuple[int, ...], attendance: Attendance, say: Callable[[Event], None]) -> None:
        self.states: dict[int, WorkerState] = {}
        self.stragglers = Stragglers()
        self._ranks = ranks
        self._attendance = attendance
        self._say = say

    @property
    def in_order(self) -> list[WorkerState]:
        """The latest states, in the workers' order."""
        return [self.states[worker] for worker in sorted(self.states)]

    def is_final(self, worker: int) -> bool:
        """Whether a worker has said its last words."""
        return worker in self.states and self.states[worker].account.final

    def lose(self, worker: int) -> None:
        """Strikes a worker off, and says so."""
        self.states.pop(worker, None)
        step = self._attendance.lose(worker)
        self._say(WorkerLost(time_s=0, worker=worker, rank=self._ranks[worker], step=step))

    def see(self, worker: int, incarnation: int) -> None:
        """Enters a worker that is there, and says so, unless it is known. Who came before it must be lost.

        Args:
            worker: its index.
            incarnation: how many have had its place before.
        """
        while self._attendance.losses(worker) < incarnation:
            self.lose(worker)
        if worker not in self._attendance.present:
            self._attendance.join(worker)
            self.stragglers.forget(worker)
            self._say(WorkerJoined(time_s=0, worker=worker, rank=self._ranks[worker]))
