"""Collection of all ranks' states for a checkpoint, while steps continue.

    lockstep      every worker sends its state after the same step; the servers' states are of that step, too, since
                  they apply no later one without the coordinator
    asynchronous  the coordinator requests the workers' states, and then the servers', which count each worker's steps

    coordinator   due ─▶ begin ── step ── step ── held ─▶ writes
    worker            state of this step ─┘  ┘
    server                    state ─────────┘

At the end of an epoch, and where the run stops, the states have arrived before, and the latest are used. A checkpoint
that cannot be completed, since a worker has missed its step, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyrhythm.roles.checkpoint_interval import Interval, Milestones
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import StateAt
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Traits

_MOST_AHEAD = 2
"""Number of states kept of each worker that is ahead of the coordinator."""


@dataclass
class _Collection:
    """States that are being collected.

    Attributes:
        step: steps done by the coordinator.
        states: states by the workers' indices.
        awaited: workers with missing states, and the number of failures of each.
        servers: states of the servers that have arrived, by shard; None: they have not been requested.
    """

    step: int
    states: dict[int, WorkerState]
    awaited: dict[int, int]
    servers: dict[int, State] | None = None


class StateCollector:
    """Collects the states of all workers and servers.

    Args:
        every: interval between checkpoints.
        leader: coordinator, which receives the states.
        traits: traits of the strategy.
        now: clock, in seconds.
    """

    def __init__(self, every: Interval, leader: Leader, traits: Traits, now: Callable[[], float]) -> None:
        self._every = every
        self._leader = leader
        self._in_step = traits.lockstep
        self._now, self._begun_s = now, now()
        round_steps = max(1, traits.exchange_every)
        self._milestones = Milestones(every, round_steps if traits.lockstep else 1)
        self._margin = 2 * round_steps
        """Steps from a request to workers in lockstep until they send their states: none must have done more."""
        self._begun_at: int | None = None
        self._appointed: int | None = None
        self._ahead: dict[int, list[WorkerState]] = {}
        """Latest states of workers in lockstep that are ahead, or of those that answer before `begin`."""
        self._requested = False
        self._open: _Collection | None = None

    @property
    def open(self) -> bool:
        """Whether states are missing."""
        return self._open is not None

    @property
    def awaits_workers(self) -> bool:
        """Whether workers' states are missing, and not those of servers alone."""
        return self._open is not None and bool(self._open.awaited)

    def due(self, done: int, epochs: int) -> bool:
        """Return whether the coordinator's state is due; request the other workers' states where they cannot know that.

        Args:
            done: steps done by the coordinator.
            epochs: see `ControlPlane.state_due`.
        """
        passed, in_step = self._milestones.passed(done, epochs), self._in_step
        if self._every.unit == "s":
            if self._begun_at is None:
                self._begun_at = done
            over = done > self._begun_at and self._now() - self._begun_s >= self._every.count
            if over and self._appointed is None and not self.open:
                self._appointed = done + self._margin if in_step else done
                self._request(self._appointed if in_step else 0)
            passed = self._appointed is not None and done >= self._appointed
            if passed:
                self._appointed = None
        elif passed and not in_step and not self.open:
            self._request(0)
        return passed

    def begin(self, step: int, *, awaits: bool, stock: dict[int, WorkerState] | None = None) -> None:
        """Begin to collect, instead of what is being collected.

        Args:
            step: steps done by the coordinator, which has handed in its own state.
            awaits: whether the states of this step, or requested ones, are still to arrive; else the latest are used.
            stock: states of all workers; None: those that they have sent.
        """
        leader, awaited = self._leader, dict[int, int]()
        states = dict(leader.workers.states) if stock is None else stock
        if awaits:
            attendance = leader.attendance
            awaited = {
                worker: attendance.losses(worker)
                for worker in attendance.present
                if worker != LEADER and not leader.is_final(worker)
            }
            states = {worker: state for worker, state in states.items() if worker not in awaited}
        self._begun_s, self._begun_at = self._now(), step
        self._open = _Collection(step, states, awaited)
        if self._in_step or not awaited:
            self._open.servers = leader.servers.request()
        self._requested = False
        for worker in awaited.copy():
            for state in self._ahead.pop(worker, []):
                if state.account.step >= step or not self._in_step:
                    self.take(state)
        if not self._in_step:
            self._ahead.clear()

    def take(self, state: WorkerState) -> None:
        """Record a state that a worker has sent."""
        held, worker, step = self._open, state.account.worker, state.account.step
        if held is not None and worker in held.awaited and not (self._in_step and step < held.step):
            if (
                self._in_step and step > held.step
            ):  # it learned of this too late, or has taken another's place
                self._open, self._begun_s = None, float("-inf")
                self._margin *= 2
            else:
                held.states[worker] = state
                del held.awaited[worker]
                return
        if self._requested or (self._in_step and self._every.unit != "epochs"):
            self._ahead[worker] = [*self._ahead.get(worker, []), state][-_MOST_AHEAD:]

    def drop_without(self, worker: int) -> None:
        """Drop the incomplete collection if it lacks the state of this worker, which sends none any more."""
        if self._open is not None and worker in self._open.awaited:
            self._open = None

    def held(self) -> tuple[dict[int, WorkerState], list[State]] | None:
        """Return the states of the workers and of the servers, once all are there; None before, and after that."""
        held, leader = self._open, self._leader
        if held is None:
            return None
        for worker, losses in list(held.awaited.items()):
            if worker not in leader.attendance.present or leader.attendance.losses(worker) != losses:
                del held.awaited[worker]
        if held.awaited:
            return None
        if held.servers is None:
            held.servers = leader.servers.request()
        found = leader.servers.all_of(held.servers)
        if found is None:
            return None
        self._open = None
        return held.states, found

    def _request(self, step: int) -> None:
        self._requested = not self._in_step
        for worker in self._leader.attendance.present - {LEADER}:
            self._leader.send_to_worker(worker, StateAt(step))
