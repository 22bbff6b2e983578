"""ParallelSGD: workers train without communication; their models are averaged once, at the end.

Zinkevich, Weimer, Li, Smola, "Parallelized stochastic gradient descent", NIPS 2010.

    w_i <- w_i - lr * g_i(w_i)             T times, each worker on its own shuffled shard
    w   =  (1/N) * sum_j w_j               once

T = number of steps in the run. Batch-norm statistics are averaged with the models: for an evaluation, and at the end.

Departures from the paper:

- Any optimizer replaces plain SGD.
- The data is sharded again in every epoch.
- The model that is evaluated after an epoch is the current mean. This costs one exchange, which does not affect
  training.
"""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.averaging.rounds.averaging import Averaging
from polyrhythm.strategies.averaging.rounds.rounds_worker import Rounds, RoundsWorker
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting


class ParallelSGD(Averaging):
    """Workers train without communication, and average their models once, at the end.

    Attributes:
        collective: algorithm that sums the models.
    """

    paper: ClassVar[Paper] = Paper(
        "Zinkevich, Weimer, Li, Smola", "Parallelized stochastic gradient descent", "NIPS", 2010
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="0",
        staleness="0",
        use_it="almost no network, and a nearly convex objective; a baseline for all other strategies",
    )
    why_not_compressed: ClassVar[str] = (
        "models are averaged once, at the end, and compression errors would never be sent: use local_sgd"
    )
    sums_gradients: ClassVar[bool] = True

    @property
    def period(self) -> int:
        return 0

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return RoundsWorker(setting, Rounds(steps=0, collective=self.collective))
