"""Local SGD: several local steps, then a mean of all models.

Stich, "Local SGD converges fast and communicates little", ICLR 2019, arXiv 1805.09767.

    w_i <- w_i - lr * g_i(w_i)             H times, without communication
    w_i <- (1/N) * sum_j w_j               then over all workers

H = `steps`. All models have the same weight, whatever their batch sizes, unless load balancing assigns workers unequal
shares of the batch: then a model's weight is its worker's mean share in the round. A worker with an empty batch takes
no step. Batch-norm statistics are never averaged in training. Each worker keeps its own, and a model that is evaluated
or saved has their mean.

With `aggregator`, models are combined by a rule that tolerates arbitrarily wrong ones; each counts the same (see
`rounds.robust_mean`).

Departure from the paper: any optimizer replaces plain SGD, and `optimizer_state` selects the treatment of its state:
each worker keeps its own (Lin et al., 2018), all take the mean, or all reset it (as CNTK does with block momentum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.aggregator import AGGREGATORS, Aggregator
from polyrhythm.strategies.averaging.rounds.averaging import CompressedAveraging
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage, ModelMean
from polyrhythm.strategies.averaging.rounds.robust_mean import RobustModelMean, robust_resharding
from polyrhythm.strategies.averaging.rounds.rounds_worker import Rounds, RoundsWorker
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.strategy import Facts, GroupOutput, Paper, Traits
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count


class LocalSGD(CompressedAveraging):
    """Workers take local steps and average their models every few steps.

    Attributes:
        steps: number of local steps of each worker between two means.
        optimizer_state: treatment of the optimizer state (momentum etc.) at a mean: keep, average or reset.
        collective: algorithm that sums the models.
        compress: compressor of each worker's change in a round; None: none.
        aggregator: combination of the models that tolerates wrong ones; None: their mean.
    """

    paper: ClassVar[Paper] = Paper(
        "Stich", "Local SGD converges fast and communicates little", "ICLR", 2019, "1805.09767"
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="equally fast machines on a slow network: H times less traffic than synchronous",
    )
    output: ClassVar[GroupOutput] = GroupOutput.MODELS
    sums_gradients: ClassVar[bool] = True

    steps: Count = 8
    optimizer_state: AtAverage = "keep"
    aggregator: Annotated[Aggregator | None, chosen("aggregator", AGGREGATORS)] = None

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.aggregator is None:
            return
        if not self.aggregator.robust:
            raise RequestError(f"local_sgd: aggregator={self.aggregator} is the default: leave it out")
        for key, value, default in (
            ("compress", self.compress, None),
            ("optimizer_state", self.optimizer_state, "keep"),
        ):
            if value != default:
                raise RequestError(
                    f"local_sgd: {key}={value} and aggregator={self.aggregator} exclude each other: give one"
                )
        if 1 < workers < self.aggregator.least:
            raise RequestError(
                f"{self.aggregator} needs at least {self.aggregator.least} models, and there are {workers} workers: "
                f"ask for more workers, or for a smaller {self.aggregator.strength}"
            )

    def traits(self, workers: int) -> Traits:
        found = super().traits(workers)
        return (
            found if self.aggregator is None else replace(found, output=GroupOutput.NOTHING, exact_sums=False)
        )

    def resharding(self, before: int, after: int) -> Resharding:
        found = super().resharding(before, after)
        return found if self.aggregator is None else robust_resharding(found, self.aggregator)

    @property
    def mean(self) -> Callable[[Communicator, FlatParameters], ModelMean] | None:
        if self.aggregator is None:
            return super().mean
        aggregator, collective = self.aggregator, self.collective
        return lambda group, flat: RobustModelMean(group, flat, collective, aggregator)

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
