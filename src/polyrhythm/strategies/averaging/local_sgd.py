"""Local SGD: several steps alone, then a mean of all models.

Stich, "Local SGD converges fast and communicates little", ICLR 2019, arXiv 1805.09767.

    w_i <- w_i - lr * g_i(w_i)             H times, each worker alone
    w_i <- (1/N) * sum_j w_j               then all together

H = `steps`. All models count the same, whatever their batches were, unless a balance gives workers unequal parts:
then by the images of their round. A worker whose batch is empty takes no step.
Batch-norm statistics are never averaged in training. Each worker keeps its own, and a model that is tested or saved has
their mean.

Departure from the paper: any optimiser takes the place of plain SGD, and `optimizer_state` says what becomes of its
state: each worker keeps its own (Lin et al., 2018), all take the mean, or all begin anew (as CNTK does with block
momentum).
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
    """Workers train alone and average their models every few steps.

    Attributes:
        steps: of each worker between two means.
        optimizer_state: what becomes of momentum and the like at a mean: keep, average or reset.
        collective: how models are added up.
        compress: what shrinks a round's movement before it travels; None: nothing.
    """

    paper: ClassVar[Paper] = Paper(
        "Stich", "Local SGD converges fast and communicates little", "ICLR", 2019, "1805.09767"
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="even machines on a slow network: H times less traffic than at every step",
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
