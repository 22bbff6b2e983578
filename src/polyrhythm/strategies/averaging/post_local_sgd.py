"""Post-local SGD: synchronous at first, local SGD afterwards.

Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020, arXiv 1808.07217.

    w' = w - lr * sum_i b_i g_i / sum_i b_i        in steps before T0, synchronous
    local SGD with H local steps                   from step T0 on

T0 = `after`, H = `steps`. The paper switches to local steps at the first decay of the learning rate; `after` is a share
of the run (below 1) or a number of steps. Batch-norm statistics are never averaged in training.

Departure from the paper: any optimizer replaces SGD. At the first local step, its state is that of the synchronous
steps, the same on all workers. `optimizer_state` selects its treatment at a mean.
"""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.log import Result
from polyrhythm.errors import RequestError
from polyrhythm.strategies.averaging.rounds.averaging import Averaging
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage, ModelMean
from polyrhythm.strategies.averaging.rounds.rounds_worker import Rounds, RoundsWorker
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.worker_part import Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count, NonNegative


class PostLocalSGD(Averaging):
    """Workers average gradients at first, and later their models every few steps.

    Attributes:
        after: start of the local steps: below 1 a share of the run, else a number of steps.
        steps: number of local steps of each worker between two means.
        optimizer_state: treatment of the optimizer state (momentum etc.) at a mean: keep, average or reset.
        collective: algorithm that sums gradients and models.
    """

    paper: ClassVar[Paper] = Paper(
        "Lin, Stich, Patel, Jaggi", "Don't use large mini-batches, use local SGD", "ICLR", 2020, "1808.07217"
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/N, later 2M(N-1)/(NH)",
        staleness="0",
        use_it="as local SGD, where accuracy must match that of small batches",
    )
    why_not_compressed: ClassVar[str] = (
        "gradients are averaged at first and models later, and compression errors of one do not apply to the "
        "other: use local_sgd"
    )
    sums_gradients: ClassVar[bool] = True
    local_steps: ClassVar[bool] = False

    after: NonNegative = 100.0
    steps: Count = 8
    optimizer_state: AtAverage = "keep"

    @property
    def period(self) -> int:
        return self.steps

    def first_local_step(self, run_steps: int | None) -> int:
        """Return T0.

        Args:
            run_steps: number of steps of a worker in the whole run; None: unknown.

        Raises:
            RequestError: T0 is a share of an unknown number of steps, or not an integer.
        """
        if self.after < 1:
            if run_steps is None and self.after > 0:
                raise RequestError(
                    f"post_local_sgd: after={self.after:g} is a share of the run, and the length of your own loop is "
                    "unknown: give a number of steps, such as after=1000"
                )
            return round(self.after * (run_steps or 0))
        if not self.after.is_integer():
            raise RequestError(
                f"post_local_sgd: after={self.after:g} is neither a share of the run nor a whole number of steps"
            )
        return int(self.after)

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Check the options.

        Raises:
            RequestError: `after` is neither a share of the run nor a whole number of steps.
        """
        super().check(workers, plan)
        self.first_local_step(1)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        collective = self.collective
        rounds = Rounds(
            steps=self.steps,
            first=self.first_local_step(setting.steps),
            collective=collective,
            optimizer_state=self.optimizer_state,
            mean=lambda group, flat: GradientsThenModels(group, flat, collective),
        )
        return PostLocalWorker(setting, rounds)


class GradientsThenModels(ModelMean):
    """Mean of models for the local steps, and mean of gradients for the synchronous steps before them.

    Args:
        group: communicator of the participating workers.
        flat: parameters and gradients of this worker.
        collective: algorithm that sums them.

    Attributes:
        gradients: mean of the gradients.
    """

    def __init__(self, group: Communicator, flat: FlatParameters, collective: Collective) -> None:
        super().__init__(group, flat, collective)
        self.gradients = GradientMean(group, flat, collective)

    def over(self, group: Communicator) -> GradientsThenModels:
        made = GradientsThenModels(group, self._flat, self._sum.passed_on())
        made.gradients = self.gradients.over(group)
        return made

    def prepare(self) -> None:
        self.gradients.prepare()
        super().prepare()

    @property
    def pending(self) -> list[Handle]:
        return self.gradients.pending


class PostLocalWorker(RoundsWorker):
    """Averages gradients during the backward pass, until the local steps begin.

    Gradients are summed in place, and a step with a failed sum is computed again. The last synchronous step is an
    exception: its gradients are copied before they are summed.
    """

    exchanger: Exchanger[GradientsThenModels]

    def __init__(self, setting: WorkerSetting, rounds: Rounds) -> None:
        super().__init__(setting, rounds)
        self._first = rounds.first
        self.exchanger.keeps = False
        self._together = False

    def begin(self, step: Step) -> None:
        self._together = step.number < self._first
        if self._together:
            self.exchanger.sums.gradients.begin(step)
        # The last mean of gradients is kept too: a worker that has it may start local steps while another lacks it.
        if step.number >= self._first - 1:
            self.exchanger.keeps = True

    def bucket_ready(self, bucket: int) -> None:
        if self._together and not self.exchanger.keeps:  # kept ones are copied before the sum
            self.exchanger.sums.gradients.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if not self._together:
            return super().gradients_ready(step, learning_rate)
        exchanger, flat = self.exchanger, self._flat  # a regrouping replaces the memory of `flat.gradients`
        kept = flat.gradients.clone() if exchanger.keeps else None

        def run(mean: GradientsThenModels, number: int) -> Result:
            if kept is not None:
                flat.gradients.copy_(kept)
            weight, stop = mean.gradients.finish(step)
            return Result(None if kept is None else flat.gradients.clone(), weight, stop)

        mean = exchanger.exchange(run)
        if exchanger.relayed and mean.vector is not None:
            flat.gradients.copy_(mean.vector)
        self.train(mean.weight, learning_rate)
        self.record_stop(mean.stop)  # a worker that joins after the stop takes no step either
        self.exchanger.since = self._done = step.number + 1
        return mean.stop
