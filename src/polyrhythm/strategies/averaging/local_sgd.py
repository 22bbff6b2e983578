"""Local SGD: several local steps, then a mean of all models.

Stich, "Local SGD converges fast and communicates little", ICLR 2019, arXiv 1805.09767.

    w_i <- w_i - lr * g_i(w_i)             H times, without communication
    w_i <- (1/N) * sum_j w_j               then over all workers

H = `steps`. All models have the same weight, whatever their batch sizes, unless load balancing assigns workers unequal
shares of the batch: then a model's weight is its worker's mean share in the round. A worker with an empty batch takes
no step. Batch-norm statistics are never averaged in training. Each worker keeps its own, and a model that is evaluated
or saved has their mean.

Departure from the paper: any optimizer replaces plain SGD, and `optimizer_state` selects the treatment of its state:
each worker keeps its own (Lin et al., 2018), all take the mean, or all reset it (as CNTK does with block momentum).
"""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.averaging.rounds.averaging import MEET_AGAIN, CompressedAveraging
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage
from polyrhythm.strategies.averaging.rounds.rounds_worker import Rounds, RoundsWorker
from polyrhythm.strategies.strategy import Facts, GroupOutput, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.quantities import Count


class LocalSGD(CompressedAveraging):
    """Workers take local steps and average their models every few steps.

    Attributes:
        steps: number of local steps of each worker between two means.
        optimizer_state: treatment of the optimizer state (momentum etc.) at a mean: keep, average or reset.
        collective: algorithm that sums the models.
        compress: compressor of each worker's change in a round; None: none.
    """

    paper: ClassVar[Paper] = Paper(
        "Stich", "Local SGD converges fast and communicates little", "ICLR", 2019, "1805.09767"
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="equally fast machines on a slow network: H times less traffic than synchronous",
        when_a_worker_dies=MEET_AGAIN,
    )
    output: ClassVar[GroupOutput] = GroupOutput.MODELS
    sums_gradients: ClassVar[bool] = True

    steps: Count = 8
    optimizer_state: AtAverage = "keep"

    @property
    def period(self) -> int:
        return self.steps

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        rounds = Rounds(
            steps=self.steps,
            collective=self.collective,
            optimizer_state=self.optimizer_state,
            mean=self.mean,
        )
        return RoundsWorker(setting, rounds)
