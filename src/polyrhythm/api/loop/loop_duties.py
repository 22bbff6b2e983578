"""Duties of the coordinator of users' own loops: it admits replacements, and sends all the final model.

worker ── StepBroken ──────▶ coordinator: notifies workers that wait in the store ── RegroupNow ──▶ they stop waiting
replacement ── EnterWorker ▶              in lockstep it waits for admission until an epoch begins
worker ── its last state ──▶              once all have arrived: the final model, with which they may leave
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyrhythm.events import Event, WorkerLost
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import FinalModel, RegroupNow, TakenBatches
from polyrhythm.roles.leading.leader import Duties
from polyrhythm.roles.leading.state_collector import StateCollector
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.result import bytes_per_step, defense_figures, staleness_figures
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


class LoopDuties(Duties):
    """Duties of the coordinator in a loop of a user's own.

    Args:
        world: context of this rank.
        strategy: strategy, which decides whether workers regroup.
        notify: receiver of losses, and of the servers' reports.

    Attributes:
        over: called when all have reached the end, and no other worker can reach it.
        ready: callback with the rank and generation of a replacement that has all shards of a failed server.
        knows: whether it knows the number of each worker's batches without reports.
        unseen: indices of failed workers, with their numbers of batches not taken and of batches in all.
        staleness: number of gradients applied by servers at each staleness; known at the end.
        started: called when training starts.
        began_s: time of the coordinator's clock at which training started.
        states: collector of states for checkpoints; None: none are written.
        write: function that begins to write a complete checkpoint; returns whether no other one is being collected.
    """

    def __init__(self, world: World, strategy: Strategy, notify: Callable[[Event], None]) -> None:
        workers = len(world.roles.workers)
        self.over: Callable[[], None] = lambda: None
        self.ready: Callable[[int, int], None] = lambda rank, generation: None
        self.knows = meets_every_step(strategy, workers)
        self.unseen: list[tuple[int, int, int]] = []
        self.staleness: Counter[int] = Counter()
        self.started: Callable[[], None] = lambda: None
        self.began_s = world.clock.now()
        self._world = world
        self._strategy = strategy
        self._notify = notify
        self._regroups = strategy.faults(workers).regroups
        self.states: StateCollector | None = None
        self.write: Callable[[], bool] = lambda: True
        self._taken: dict[int, TakenBatches] = {}
        self._at_door: dict[int, int] = {}

    def emit(self, event: Event) -> None:
        """Record the batches that a failed worker had not taken of its share, by its last report or by all reports."""
        if isinstance(event, WorkerLost):
            last = self._taken.get(LEADER if self.knows else event.worker)
            if last is not None and last.taken < last.of:
                self.unseen.append((event.worker, last.of - last.taken, last.of))
        self._notify(replace(event, time_s=self.elapsed_s))

    @property
    def elapsed_s(self) -> float:
        return self._world.clock.now() - self.began_s

    def begin(self, epoch: int) -> None:
        self.began_s = self._world.clock.now()
        self.started()

    def after_step(self) -> None:
        self.leader.read()

    def save_every(self, every: Interval, since: tuple[int, int]) -> None:
        """Collect states for checkpoints at this interval from now on.

        Args:
            every: interval between checkpoints.
            since: steps and epochs done when the run began.
        """
        traits = self._strategy.traits(len(self._world.roles.workers))
        self.states = StateCollector(every, self.leader, traits, self._world.clock.now)
        self.states.due(*since)

    def state_due(self, done: int, epochs: int) -> bool:
        return self.states is not None and not self.leader.workers.final and self.states.due(done, epochs)

    def state_received(self, state: WorkerState) -> None:
        if self.states is None:
            return
        if state.account.final:  # without what resuming needs
            self.states.drop_without(state.account.worker)
        else:
            self.states.take(state)

    def took(self, worker: int, batches: TakenBatches) -> None:
        self._taken[worker] = batches

    def defers(self, rank: int, generation: int) -> bool:
        """Keep replacements waiting until the loop admits them, where workers regroup."""
        if self._regroups:
            self._at_door[rank] = generation
        return self._regroups

    def regrouping(self, number: int) -> None:
        """Notify workers that wait elsewhere."""
        for worker in self.leader.attendance.present - {LEADER}:
            self.leader.send_to_worker(worker, RegroupNow(number))

    def server_ready(self, rank: int, generation: int) -> None:
        self.ready(rank, generation)

    @property
    def waiting(self) -> dict[int, int]:
        """Generations of the replacements that wait for admission, by the workers' indices."""
        ranks = self._world.roles.workers
        return {ranks.index(rank): generation for rank, generation in self._at_door.items()}

    def is_there(self, worker: int) -> bool:
        """Whether a worker, or a replacement of it, takes part."""
        return worker in self.leader.attendance.present

    def admit(self, workers: Iterable[int], gone: Callable[[int], bool]) -> bool:
        """Admit replacements that wait, or are about to; return whether there was one.

        Args:
            workers: indices of the replacements.
            gone: whether a given one has failed since.
        """
        admitted = False
        for worker in workers:
            rank = self._world.roles.workers[worker]
            while rank not in self._at_door and not gone(worker):
                self.leader.read()
                self._world.clock.sleep(0.002)
            if rank in self._at_door:
                self.leader.admit(rank, self._at_door.pop(rank))
                admitted = True
        return admitted

    def ask_servers(self) -> list[State]:
        """Return the state of every shard."""
        return self.leader.servers.ask()

    def met(self, number: int, awaited: Collection[int]) -> dict[int, WorkerState] | None:
        """Return all states handed in for the run's state, by workers' indices; None as long as one is missing.

        Args:
            number: number of the occasion.
            awaited: indices of the workers that must hand in a state.
        """
        found = {
            worker: state
            for worker, state in sorted(self.leader.workers.states.items())
            if state.loop.get("number") == number
        }
        return found if found.keys() >= set(awaited) else None

    def figures(self) -> dict[str, Any]:
        """Return the results of the run, once all have left."""
        accounts = [state.account for state in self.leader.workers.in_order]
        reports, attendance = list(self.leader.servers.reports.values()), self.leader.attendance
        images, seconds = sum(account.session_images for account in accounts), self.elapsed_s
        losses = self.leader.servers.attendance.losses
        return {
            "steps": max(account.step for account in accounts),
            "seconds": seconds,
            "images_per_s": (images + attendance.images_of_lost) / seconds if seconds > 0 else 0.0,
            "workers_lost": attendance.lost,
            "workers_joined": attendance.joined,
            "servers_lost": losses.lost,
            "servers_joined": losses.joined,
            "bytes_sent_per_step": bytes_per_step(accounts, reports, attendance.steps_of_lost),
            "staleness": staleness_figures(accounts, reports),
            **defense_figures(reports),
            **self.leader.difference_figures,
        }

    def end(self) -> FinalModel:
        """Release the servers, and send all workers the final model, with which they leave."""
        leader, replica = self.leader, self.leader.replica
        assert replica is not None, "something has been distributed"
        self.over()
        leader.read_until(self.write)
        replica.part.release()
        states = leader.workers.in_order
        model = final_model(replica.flat.vector, [state.buffers for state in states])
        for state in states[1:]:
            leader.send_to_worker(state.account.worker, model)
        leader.servers.wait()
        for report in leader.servers.reports.values():
            self.staleness.update({int(age): count for age, count in report["staleness"].items()})
        return model


def final_model(vector: Tensor, buffers: Sequence[dict[str, Tensor]]) -> FinalModel:
    """Return the final model, with worker 0's parameters.

    Batch-norm statistics, which each worker has kept on its own, are averaged; buffers that are equal everywhere
    keep their bits, and counters are worker 0's.

    Args:
        vector: `(size,)`, parameters of worker 0.
        buffers: buffers of all workers, worker 0's first.
    """
    return FinalModel(
        vector.detach().cpu(), {name: _mean([each[name] for each in buffers]) for name in buffers[0]}
    )


def load_final_model(replica: Replica, model: FinalModel) -> None:
    """Overwrite a replica's parameters and buffers."""
    replica.flat.vector.copy_(model.vector)
    replica.flat.spread_parameters()
    for name, value in replica.buffers.items():
        value.copy_(model.buffers[name])


def _mean(values: list[Tensor]) -> Tensor:
    """Average values other than integers; not by the plain mean, which would not keep the bits of equal ones."""
    first = values[0]
    if not first.is_floating_point():
        return first
    away = [torch.where(value == first, torch.zeros_like(value), value - first) for value in values[1:]]
    return first + sum(away, torch.zeros_like(first)) / len(values)


def meets_every_step(strategy: Strategy, workers: int) -> bool:
    """Whether all workers take their batches together, so that the coordinator knows how many each has taken."""
    traits = strategy.traits(workers)
    return traits.lockstep and traits.exchange_every == 1
