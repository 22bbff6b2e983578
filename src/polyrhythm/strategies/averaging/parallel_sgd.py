"""ParallelSGD: every worker trains alone; in the end there is one mean of all models.

Zinkevich, Weimer, Li, Smola, "Parallelized stochastic gradient descent", NIPS 2010.

    w_i <- w_i - lr * g_i(w_i)             T times, each worker alone on its own shuffled share
    w   =  (1/N) * sum_j w_j               once

T = the length of the run. Batch-norm statistics are averaged where the models are: for a test, and at the end.

Departures from the paper:

- Any optimiser takes the place of plain SGD.
- Shares are dealt anew every epoch.
- The model that is tested after an epoch is the mean at that moment. This costs an exchange, which training does not
  look at.
"""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.averaging.rounds.averaging import MEET_AGAIN, Averaging
from polyrhythm.strategies.averaging.rounds.rounds_worker import Rounds, RoundsWorker
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting


class ParallelSGD(Averaging):
    """Workers train alone, and average their models once, when all are done.

    Attributes:
        collective: how models are added up.
    """

    paper: ClassVar[Paper] = Paper(
        "Zinkevich, Weimer, Li, Smola", "Parallelized stochastic gradient descent", "NIPS", 2010
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="0",
        staleness="0",
        use_it="next to no network, and a model that is nearly convex; a baseline for everything else",
        when_a_worker_dies=MEET_AGAIN,
    )
    why_not_compressed: ClassVar[str] = (
        "models meet once, in the end, and what is left out then would never arrive: use local_sgd"
    )
    sums_gradients: ClassVar[bool] = True

    @property
    def period(self) -> int:
        return 0

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return RoundsWorker(setting, Rounds(steps=0, collective=self.collective))
