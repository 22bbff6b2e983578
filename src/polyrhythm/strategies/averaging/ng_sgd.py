"""NG-SGD: local steps along the natural gradient, and a mean of all models every `steps` steps.

Povey, Zhang, Khudanpur, "Parallel training of DNNs with natural gradient and parameter averaging", ICLR workshop 2015,
arXiv 1410.7455.

    w_i <- w_i - lr * |g| / |p| * p,  p = A_i^-1 g_i(w_i) B_i^-1     H times, without communication, layer by layer
    w_i <- (1/N) * sum_j w_j                                         then over all workers

H = `steps`. A and B are smoothed estimates of the Fisher matrices of the layer's outputs and inputs, separate on each
worker (see `natural_gradient` and `low_rank_fisher` for `rank`, `alpha`, `eta` and `update_every`). With rank = 0 this
is `local_sgd`, bit for bit. Batch-norm statistics are never averaged in training.

Departures from the paper:

- The paper averages after K samples of each worker, about 400,000, so its H is K over the batch size. The default here
  is short enough for runs of a few hundred steps.
- Estimates are made from rows and columns of mean gradients, because per-sample gradients are not available.
- Biases are not preconditioned.
- Any optimizer, the run's own, replaces plain SGD and receives p as its gradient.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyrhythm.strategies.averaging.rounds.averaging import CompressedAveraging
from polyrhythm.strategies.averaging.rounds.rounds_worker import NaturalGradients, Rounds, RoundsWorker
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.natural_gradient import Fisher
from polyrhythm.training.quantities import Count, InnerFraction, NonNegative


class NGSGD(CompressedAveraging):
    """Workers take local steps along natural gradients and average their models every few steps.

    Attributes:
        steps: number of local steps of each worker between two means.
        rank: rank of the estimate of each Fisher matrix; 0: none, which is local SGD.
        alpha: damping: multiple of the mean eigenvalue of a Fisher matrix that is added to each eigenvalue.
        eta: share of an estimate that each update replaces.
        update_every: number of steps between two updates of the estimates, after the first ten steps.
        collective: algorithm that sums the models.
        compress: compressor of each worker's change in a round; None: none.
    """

    paper: ClassVar[Paper] = Paper(
        "Povey, Zhang, Khudanpur",
        "Parallel training of DNNs with natural gradient and parameter averaging",
        "ICLR workshop",
        2015,
        "1410.7455",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="as local SGD, where layers are badly scaled and rounds are long: natural gradients keep models close",
    )
    sums_gradients: ClassVar[bool] = True

    steps: Count = 32
    rank: int = Field(default=20, ge=0)
    alpha: NonNegative = 4.0
    eta: InnerFraction = 0.1
    update_every: Count = 4

    @property
    def period(self) -> int:
        return self.steps

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        fisher = Fisher(self.rank, self.alpha, self.eta, self.update_every)
        rounds = Rounds(
            steps=self.steps,
            collective=self.collective,
            preconditioner=NaturalGradients(setting.flat, fisher),
            mean=self.mean,
        )
        return RoundsWorker(setting, rounds)
