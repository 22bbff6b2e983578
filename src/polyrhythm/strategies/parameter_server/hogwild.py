"""Hogwild!: workers of one host update one vector in shared memory, without locks.

Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011, arXiv
1106.5730.

    repeat      w_i = copy of w;    w = w - lr g_i(w_i), number by number, whatever others do in the meantime

w = the shared vector. Any optimizer takes SGD's place, and each worker has a state of its own.

Departures from the paper:

- Gradients are dense, so a worker touches all numbers. It reads them once a step into a copy of its own.
- Numbers are changed by plain loads and stores. Where two workers change one number at the very same moment, one change
  may be lost. In the paper they are atomic.
- The paper multiplies lr by about 0.9 every epoch. Here that is a schedule.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import torch

from polyrhythm.communication.communicator import NoSharedMemory
from polyrhythm.errors import RequestError
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.state import OWN, Part, StateField, reset
from polyrhythm.strategies.strategy import Facts, Paper, Strategy, Traits
from polyrhythm.strategies.worker_part import WORKER, OptimizerSource, Step, WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import update_as


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
    )
    why_not_compressed: ClassVar[str] = "its workers share memory, and nothing travels: leave compress out"

    def traits(self, workers: int) -> Traits:
        return Traits(
            lockstep=workers == 1,
            waits_for_slower=False,
            draws=workers > 1,
            updates=workers,
            one_host=True,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return a policy to continue: the others have the vector; half an update is like an overlapping one."""
        if workers == 1:
            return FaultPolicy()
        # A replacement of worker 0 finds the vector through any of the others.
        return FaultPolicy.independent(workers)

    def resharding(self, before: int, after: int) -> Resharding:
        return Resharding(
            after=after,
            text="the shared vector stays, and {kept} workers keep their optimizers",
            newcomers="; {new} begin without momentum",
            workers=(
                StateField("counts", list[int], reset(lambda start: [start.step] * after, "worker")),
                StateField("", Part, OWN),
            ),
            count=lambda held: list(held.workers[0][1]["counts"]),
        )

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return HogwildWorker(setting)


class HogwildWorker(WorkerPart):
    """Steps on the shared vector with gradients of its copy.

    The counts are shared as well: number of gradients of each worker in the vector, and whether a stop was
    requested. Each worker writes its own only, so none is lost. A worker that is killed in the middle of an
    update has not counted it, so its replacement takes that step again.
    """

    follows = OptimizerSource.PLAN
    fields = (
        WORKER,
        StateField("counts", list[int], OWN, at="_updates"),
        StateField("optimizer", Part, OWN, under=""),
    )

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__()
        self._workers = setting.workers
        self._succeeds = setting.succeeds
        self._rank = setting.workers.rank
        self._flat = setting.flat
        self._plan = setting.plan
        self._vector = setting.flat.vector  # until the shared one exists
        self._optimizer = setting.plan.build(self._vector)
        self._counts = torch.zeros(setting.workers.size + 1, dtype=torch.int64)
        self._read = self._counts.clone()

    def start(self, step: int) -> int:
        """Share worker 0's vector, or find it as a replacement.

        Raises:
            RequestError: the workers share no memory.
            PeerLost: worker 0 is lost, and no other process has the vector.
        """
        try:
            self._vector = self._workers.shared_vector("parameters", self._flat.vector, later=self._succeeds)
            self._counts = self._workers.shared_vector("counts", self._counts, later=self._succeeds)
        except NoSharedMemory as error:
            raise RequestError(
                f"hogwild needs memory that all workers share, and {error.reason}: run all workers on the CPUs of one "
                "host, or take parameter_server or downpour"
            ) from None
        momenta = self._optimizer.state()
        self._optimizer = self._plan.build(self._vector)
        self._optimizer.load_state(momenta)
        self.settle()
        done = self._updates[self._rank]
        # Rank 0's copy of the vector may be older than this worker's counts; the largest ones are removed.
        self.staleness = Counter(sorted(self.staleness.elements())[:done])
        return done

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if step.weight > 0:
            self.staleness[int((self._counts[:-1] - self._read[:-1]).sum())] += 1
            update_as(self._optimizer, self._flat, step.plan, learning_rate)
        self._counts[self._rank] += 1
        if step.stop:
            self._counts[-1] = 1
        self.settle()
        return bool(self._counts[-1])

    def settle(self) -> None:
        self._read = self._counts.clone()
        self._flat.vector.copy_(self._vector)

    catch_up = release = settle

    @property
    def _updates(self) -> list[int]:
        """Number of gradients of each worker in the copy of the vector."""
        return self._read[:-1].tolist()

    @_updates.setter
    def _updates(self, counts: list[int]) -> None:
        self._counts[:-1] = self._read[:-1] = torch.tensor(counts)
