"""Common parts of D-PSGD and SGP: workers that mix with their neighbors in turns, all in lockstep.

A turn is the mixing of one step:

    worker 0   turn 3, turn 4 ┃                              ┃ turn 6 …
    worker 1   turn 3, turn 4, turn 5 ┃ all at one point     ┃ turn 6 …
    worker 2   turn 3, failed         ┃ (`GroupView`)          ┃
    worker 3   turn 3 ┃                 steps 4, 5 unmixed ──▶ turn 6 …

A turn does not synchronize all workers, so after a failure the remaining ones are at different steps. They restart from
the mean of their states, weighted by mass, with a mass of 1 each. A worker that is behind takes its missing steps
without mixing, so no step is skipped; then all mix by the matrices of the topology for the new number of workers
(`made_again`). The mean includes the gradient of the interrupted step, which is not applied again. A replacement does
not contribute to the mean, but starts from it; it contributes only if all others fail before the mean is computed.

The move to the common point is atomic:

    progress   each worker sends its progress       an all-reduce of a few numbers
    mean       point = sum_j x_j / sum_j a_j        an all-reduce of the model; a_j: mass, in D-PSGD 1
    commit     all have the point                   an all-reduce of a few numbers

If all contributors fail before the exchange, the copies of their states on replacements are used instead. If the last
all-reduce fails, the workers on which it succeeded move to the point, and the others do so at the next exchange of
progress. So each worker's state is counted once, even if a reunion fails repeatedly.

A stop request is sent with the messages, as the number of the last step:

    step         4        5        6        7
    worker 0   request: "stop after 6" ─▶ neighbors
    worker 1              received ─▶ neighbors
    worker 2                       received   all stop after step 6, when three turns have reached every worker

A worker that receives a stop request chooses the last step so that all workers know it by then. The earliest of several
requested steps applies; that number, too, has reached every worker before the step is over.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, Self

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Exchanger, Sums
from polyrhythm.communication.log import MODELS, Result
from polyrhythm.communication.message import Message
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gossip.mixing.replica import mean_of_all
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Remarks, Strategy, Traits
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topology import TOPOLOGIES, Shares, Topology
from polyrhythm.strategies.worker_part import Logged, Step, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan


class InTurns(Strategy, Remarks):
    """Base of strategies with synchronous messages to neighbors.

    Attributes:
        topology: graph of the messages, with the weights.
    """

    topology: Annotated[Topology, chosen("topology", TOPOLOGIES)]

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        self.topology.check(workers)

    def remark(self, workers: int) -> str:
        return remark(self.topology, workers)

    def traits(self, workers: int) -> Traits:
        return Traits(local_models=workers > 1, counts_samples=False)

    def faults(self, workers: int) -> FaultPolicy:
        return FaultPolicy.regrouping(workers)


_NEVER = -1


class TurnsWorker(Logged, Sums):
    """Mixes in turns. Means of all models are entries of the exchanger's log; turns are not.

    Args:
        setting: setting of the worker.
        topology: topology of the mixing.
        check: function that rejects a number of workers for which the topology does not exist.
        delay: number of steps after which a received message is applied.

    Attributes:
        on_missed_mean: callback with a result of `common_model` that this worker has missed, before it restarts with
            the others; it must not change the mean, `(size,)`.
    """

    def __init__(
        self, setting: WorkerSetting, topology: Topology, check: Callable[[int], None], delay: int = 0
    ) -> None:
        super().__init__()
        self._flat = setting.flat
        self._topology = topology
        self._check = check
        self._delay = delay
        self._turns = Turns(topology, setting.workers)
        self._ending = self._turns.ending(delay)
        self._reunion = GroupView(self._begin_together)
        self._brings = True
        self.on_missed_mean: Callable[[Tensor], None] = lambda mean: None
        self._done = 0
        self._mixes_from = 0
        self._presented = self._presented_to_all = _NEVER
        self.exchanger = Exchanger(setting.workers, self)
        self.exchanger.keeps = self.exchanger.mixes = True

    def start(self, step: int) -> int:
        self._done = step
        self.begin_equal()
        return step

    @abstractmethod
    def brought(self) -> tuple[Tensor, float]:
        """Return this worker's contribution to a reunion: its parameters, `(size,)`, times their mass, and the mass."""

    @abstractmethod
    def model(self) -> Tensor:
        """Return this worker's contribution to the mean of all models, `(size,)`."""

    @abstractmethod
    def begin_at(self, vector: Tensor) -> None:
        """Continue from other parameters, `(size,)`, the same bits on all workers; they are copied."""

    def common_model(self) -> Tensor:
        """Return the mean of all workers' models, `(size,)`; called on all."""
        return self._mean(aside=0)

    def present(self) -> Tensor | None:
        """Return the mean of all workers' models, unless a worker that has joined has passed this exchange."""
        return self._mean(aside=MODELS) if self._done > self._presented_to_all else None

    @abstractmethod
    def over(self, group: Communicator) -> Self:
        """Return this worker, which mixes with the members of the exchanger's present view; discard its messages."""

    def prepare(self) -> None:
        """Restart from the mean of all states together with the others, unless these only have to leave."""
        if self.exchanger.finished:
            return
        entry = self.exchanger.log.under_way
        if entry is not None and entry.result is not None and not entry.aside:
            assert entry.result.vector is not None, "all contribute a model"
            self.on_missed_mean(entry.result.vector)
        workers = self.exchanger.workers
        own = Progress(self._done, self._presented, self._ending.last)
        stated = self._reunion.exchange(workers, own, self._flat.vector)
        self._reunion.meet(workers, *self.brought(), brings=self._brings)
        self._mixes_from = max(worker.steps for worker in stated)
        self._presented_to_all = max(worker.presented for worker in stated)
        self._turns = Turns(made_again(self._topology, self._check, workers.size), workers)
        known = [worker.last for worker in stated if worker.last is not None]
        self._ending = self._turns.ending(self._delay, min(known, default=None))

    @property
    def has_stopped(self) -> bool:
        """Whether the last step is over; there is no mixing after it."""
        return self._ending.after(self._done - 1)

    def enter(self, state: State, step: int) -> None:
        """Start with a copy of another worker's state, which does not contribute to the mean of the restart."""
        super().enter(state, step)
        self._done, self._brings = step, False
        self._presented = _NEVER if self.exchanger.joins == MODELS else step

    def _mean(self, *, aside: int) -> Tensor:
        def run(_: TurnsWorker, number: int) -> Result:
            return Result(mean_of_all(self.exchanger.workers, self.model()), 1.0, False)

        mean = self.exchanger.exchange(run, aside=aside).vector
        assert mean is not None, "all contribute a model"
        return mean

    def _mixes(self, step: int) -> bool:
        return step >= self._mixes_from

    def _pass_stop_on(self, step: Step) -> None:
        if step.stop:
            self._ending.request_stop(max(step.number, self._mixes_from))

    def _take_turn(self, turn: Callable[[], None]) -> None:
        """Take a turn of a step; if a worker fails during it, take it again with the others."""
        while not self.exchanger.attempt(turn):
            pass

    def _learn(self, step: Step, update: Callable[[], None]) -> None:
        if step.weight > 0:
            update()
            self.staleness[0] += 1

    def _over(self, step: Step) -> bool:
        """Complete a step; return whether this worker stops after it."""
        self._done = self.exchanger.since = step.number + 1
        return self._ending.after(step.number)

    def _begin_together(self, point: Tensor) -> None:
        self.begin_at(point)
        self._brings = True


NAMED_UP_TO = 1000
"""Largest number of workers with a reported spectral gap; the eigenvalues of larger graphs take seconds."""


class Turns:
    """One worker's place in a topology.

    Args:
        topology: topology with the schedule of the turns.
        workers: communicator of all workers.
    """

    def __init__(self, topology: Topology, workers: Communicator) -> None:
        self._topology = topology
        self._size = workers.size
        period = topology.period(self._size)
        self._shares = [topology.shares(workers.rank, self._size, turn) for turn in range(period)]

    def shares(self, step: int) -> Shares:
        """Return the shares that this worker sends and receives at a step."""
        return self._shares[step % len(self._shares)]

    def ending(self, delay: int = 0, last: int | None = None) -> Ending:
        """Return the agreement on the last step.

        Args:
            delay: number of steps after which a received message is applied.
            last: step after which all stop; None: unknown.
        """
        return Ending(lambda: self._topology.turns_to_all(self._size) + delay, last)


def made_again(topology: Topology, check: Callable[[int], None], peers: int) -> Topology:
    """Return the topology of the remaining workers: the same kind of graph, or a ring if they are too few for it.

    Args:
        topology: requested topology.
        check: function that rejects a number of workers for which the topology does not exist.
        peers: number of remaining workers.
    """
    try:
        check(peers)
    except RequestError:
        return Ring()
    return topology


def remark(topology: Topology, workers: int) -> str:
    """Return a line with the spectral gap and the degree of a topology for `workers` workers."""
    if not 1 < workers <= NAMED_UP_TO:
        return ""
    degree = max(
        len(topology.targets(peer, workers, turn))
        for peer in range(workers)
        for turn in range(topology.period(workers))
    )
    return (
        f"{topology} of {workers} workers: spectral gap {topology.spectral_gap(workers):.4g}, at most "
        f"{degree} message{'s' if degree > 1 else ''} of a worker a step"
    )


class Ending:
    """Agreement of the workers on the last step, as known to one worker.

    Args:
        turns_to_all: function that returns the number of steps in which a message reaches all workers.
        last: step after which all stop; None: unknown.

    Attributes:
        last: step after which all stop, as far as this worker knows; None: unknown.
    """

    def __init__(self, turns_to_all: Callable[[], int], last: int | None = None) -> None:
        self._turns_to_all = turns_to_all
        self.last = last

    def request_stop(self, step: int) -> None:
        """Process a stop request to this worker, received before its message of a step was sent."""
        self._agree(step + max(1, self._turns_to_all()) - 1)

    def mark(self, message: Message) -> Message:
        """Return a message with the last step, if it is known: `stop` set, the step as `version`."""
        return message if self.last is None else message._replace(stop=True, version=self.last)

    def record(self, message: Message) -> None:
        """Record the last step from a neighbor's message."""
        if message.stop:
            self._agree(message.version)

    def after(self, step: int) -> bool:
        """Whether all workers stop after a step or have stopped before it."""
        return self.last is not None and step >= self.last

    def _agree(self, last: int) -> None:
        self.last = last if self.last is None else min(last, self.last)


class Progress(NamedTuple):
    """Progress of one worker.

    Attributes:
        steps: number of steps done.
        presented: number of steps up to which it takes no part in presenting the model (it joined afterwards).
        last: step after which all stop, as far as it knows; None: unknown.
    """

    steps: int
    presented: int = _NEVER
    last: int | None = None


class GroupView:
    """Restart of all workers from a common point: one worker's side.

    Args:
        take: function that sets this worker's state to a point, `(size,)`.
    """

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self._take = take
        self._point: Tensor | None = None
        self._number = 0
        self._taken = 0

    def exchange(self, workers: Communicator, own: Progress, like: Tensor) -> list[Progress]:
        """Exchange the progress of all workers, and move to the previous point if other workers have moved to it.

        Args:
            workers: all present workers.
            own: progress of this worker.
            like: tensor on the device of the communicator.

        Returns:
            The progress of each worker, in rank order.

        Raises:
            PeerLost: a worker failed.
        """
        last = _NEVER if own.last is None else own.last
        table = _gathered(workers, [own.steps, own.presented, last, self._number, self._taken], like)
        if self._point is not None and any(row[4] == self._number for row in table):
            self._accept()
        self._point = None
        self._number = max(max(row[3], row[4]) for row in table)
        return [
            Progress(steps, presented, None if last == _NEVER else last)
            for steps, presented, last, *_ in table
        ]

    def meet(self, workers: Communicator, held: Tensor, mass: float, *, brings: bool = True) -> None:
        """Move to the common point of all workers.

        Args:
            workers: all present workers, after an exchange of their progress.
            held: state of this worker times its mass, `(size,)`.
            mass: mass of this worker.
            brings: whether the state is its own; else it is a copy, which counts only without other contributions.

        Raises:
            PeerLost: a worker failed.
        """
        whole = torch.cat([held, held.new_tensor([mass])])
        total = whole if brings else torch.zeros_like(whole)
        workers.all_reduce(total)
        if total[-1] == 0:  # there was no contribution, and `whole` is unchanged
            total = whole
            workers.all_reduce(total)
        self._point = total[:-1].div_(total[-1])
        self._number += 1
        _gathered(workers, [], total)
        self._accept()

    def _accept(self) -> None:
        assert self._point is not None, "there is a point to take"
        self._take(self._point)
        self._point, self._taken = None, self._number


def _gathered(workers: Communicator, own: Sequence[int], like: Tensor) -> list[list[int]]:
    """Return the numbers of all workers, in rank order."""
    table = torch.zeros(workers.size, len(own) + 1, dtype=torch.float64, device=like.device)
    table[workers.rank] = table.new_tensor([*own, 1])
    flat = table.flatten()
    workers.all_reduce(flat)
    return [[int(value) for value in row] for row in flat.view(workers.size, -1)[:, :-1].tolist()]
