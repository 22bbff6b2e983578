"""Hogwild!: workers of one host update one vector in shared memory, without locks.

Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011, arXiv
1106.5730.

    repeat      w_i = copy of w;    w = w - lr g_i(w_i), number by number, whatever others do meanwhile

w = the shared vector. Any optimiser takes SGD's place, and each worker has a state of its own.

Departures from the paper:

- Gradients are dense, so a worker touches all numbers. It reads them once a step into a copy of its own.
- Numbers are changed by plain loads and stores. Where two workers change one number at the very same moment, one change
  may be lost. In the paper they are atomic.
- The paper multiplies lr by about 0.9 every epoch. Here that is a schedule.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.communicator import NoSharedMemory
from polyrhythm.errors import RequestError
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.state import Resharding, State, StateField
from polyrhythm.strategies.strategy import Facts, Paper, Strategy, Traits
from polyrhythm.strategies.worker_part import CatchesUp, Step, UsesServers, WorkerPart, WorkerSetting


class Hogwild(Strategy):
    """Workers of one host update one vector in shared memory, without locks."""

    paper: ClassVar[Paper] = Paper(
        "Niu, Recht, Ré, Wright",
        "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
        "NIPS",
        2011,
        "1106.5730",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="0",
        staleness="N-1",
        use_it="several workers on one host, with small or sparse models",
        when_a_worker_dies="the others go on; a successor finds the vector as they have left it",
    )

    def traits(self, workers: int) -> Traits:
        """Return those of workers that share one vector; worker 0 counts its own gradients for all."""
        return Traits(
            lockstep=workers == 1,
            waits_for_slower=False,
            updates=workers,
            rate_divisor=workers,
            replayable=False,
            one_host=True,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return going on: the others have the vector, and half an update is no worse than one that others cross."""
        if workers == 1:
            return FaultPolicy()
        # A successor of worker 0 finds the vector through any of the others.
        return FaultPolicy(worker=OnLoss.GO_ON, leader=True, spares=workers - 1, rejoin=Rejoin.LEVEL)

    def resharding(self, before: int, after: int) -> Resharding:
        """The shared vector stays as worker 0 has read it; newcomers begin without momentum."""
        return Resharding(
            after=after,
            text="the shared vector stays, and {kept} workers keep their optimisers",
            newcomers="; {new} begin without momentum",
            workers=(
                StateField("counts", "reset", "worker", lambda start: [start.step] * after),
                StateField("*", "keep", "worker"),
            ),
            count=lambda held: list(held.workers[0][1]["counts"]),
        )

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Return the part of one worker."""
        return HogwildWorker(setting)


class HogwildWorker(WorkerPart, CatchesUp, UsesServers):
    """Steps on the shared vector with gradients of its copy.

    The counts are shared as well: how many gradients of each worker the vector holds, and whether someone wants to
    stop. Each worker writes its own only, so none is lost. Who is killed in the middle of an update has not counted it,
    so its successor takes that step again.
    """

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__()
        self._workers = setting.workers
        self._succeeds = setting.succeeds
        self._rank = setting.workers.rank
        self._flat = setting.flat
        self._plan = setting.plan
        self._vector = setting.flat.vector  # until the shared one is there
        self._optimizer = setting.plan.build(self._vector)
        self._counts = torch.zeros(setting.workers.size + 1, dtype=torch.int64)
        self._read = self._counts.clone()
        self._resumed: State | None = None

    def start(self, step: int) -> int:
        """Shares worker 0's vector; a successor finds it.

        Raises:
            RequestError: the workers share no memory.
            PeerLost: worker 0 is lost, and nobody else has the vector; to be called again when there is a new one.
        """
        if self._resumed is not None and self._rank == 0:
            self._counts[:-1] = torch.tensor(self._resumed[1]["counts"])
        try:
            self._vector = self._workers.shared_vector("parameters", self._flat.vector, later=self._succeeds)
            self._counts = self._workers.shared_vector("counts", self._counts, later=self._succeeds)
        except NoSharedMemory as error:
            raise RequestError(
                f"hogwild needs memory that all workers share, and {error.reason}: run all workers on the CPUs of one "
                "host, or take parameter_server or downpour"
            ) from None
        self._optimizer = self._plan.build(self._vector)
        if self._resumed is not None:
            self._take_back(*self._resumed)
        self._look()
        return int(self._counts[self._rank])

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Updates the shared vector, and takes a copy for the next step."""
        if step.weight > 0:
            self.staleness[int((self._counts[:-1] - self._read[:-1]).sum())] += 1
            self._optimizer.step(self._flat.gradients, learning_rate)
        self._counts[self._rank] += 1
        if step.stop:
            self._counts[-1] = 1
        self._look()
        return bool(self._counts[-1])

    def settle(self) -> None:
        """Takes the newest values."""
        self._look()

    def catch_up(self) -> None:
        """Takes the newest values."""
        self._look()

    def let_go(self) -> None:
        """All have left: takes their last updates."""
        self._look()

    def state(self) -> State:
        """Gives this worker's optimiser, and how many gradients of each worker its copy holds."""
        tensors, facts = self._optimizer.state()
        return tensors, {"worker": self._rank, "counts": self._read[:-1].tolist(), "optimizer": facts}

    def load_state(self, state: State) -> None:
        """Takes them back; the vector is worker 0's copy, and its counts are what counts."""
        self._resumed = state

    def _take_back(self, tensors: dict[str, Tensor], facts: dict[str, object]) -> None:
        if facts["worker"] != self._rank:
            return  # another's, where this one had handed in none
        self._optimizer.load_state(tensors, facts["optimizer"])  # type: ignore[arg-type]

    def _look(self) -> None:
        self._read = self._counts.clone()
        self._flat.vector.copy_(self._vector)
