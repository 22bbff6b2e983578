"""Hybrid model and data parallelism: convolutions data parallel, fully connected layers cut by their neurons.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section 4; Wu,
Yan, Shan, Dang, Sun, "Deep Image", 2015, arXiv 1501.02876, section 3.1.

    trunk      w' = w - lr * sum_i b_i g_i / sum_i b_i     g_i worker i's mean gradient, by an all-reduce
    slice s    w' = w - lr * sum_i b_i g_is / sum_i b_i    computed by worker s from everybody's examples

b_i = samples in worker i's batch, s = the neurons of one worker. The result is that of one large batch, whatever the
`scheme`. Workers share the computing of the fully connected layers, the state of their optimiser and their updates.
They do not share the memory for their parameters and gradients, so that any worker can be tested and saved.

M_c and M_fc = the bytes of the trunk and of the fully connected layers, A = the bytes of one example's features where
the network is cut, b = the samples in a worker's batch.

Departures from the paper:

- The head is updated once a step, never after every round.
- The slices meet on all workers at the end of an epoch only.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.hybrid_pass import HybridPass, Loss
from polyrhythm.partition.hybrid_update import HybridUpdate, check_elementwise
from polyrhythm.partition.ownership import Ownership
from polyrhythm.partition.rehearsed_pass import HeadSizes, RehearsedPass
from polyrhythm.partition.scheme import Scheme
from polyrhythm.specs import chosen
from polyrhythm.strategies.facts import Facts
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.slices_resharding import OfSlices
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan


class Hybrid(Strategy):
    """All workers average the gradients of convolutions, and each trains its own neurons of the layers after them.

    Attributes:
        scheme: which examples pass the fully connected layers together: `a` all, `b` one worker's after another's, `c`
            an equal share of every worker's.
        collective: how the convolutions' gradients are added up.
    """

    paper: ClassVar[Paper] = Paper(
        "Krizhevsky",
        "One weird trick for parallelizing convolutional neural networks",
        "arXiv",
        2014,
        "1404.5997",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M_c(N-1)/N + 2(N-1)bA, and outputs of hidden layers",
        staleness="0",
        use_it="convolutions followed by large fully connected layers (alexnet, deep_image), while 4bAN < M_fc",
    )
    cuts_network: ClassVar[bool] = True

    scheme: Scheme = "a"
    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()

    def check_optimizer(self, plan: OptimizerPlan, workers: int) -> None:
        """Refuses one that looks at whole layers."""
        check_elementwise(plan, workers)

    def in_step(self, workers: int) -> bool:
        """Always."""
        return True

    def agrees(self, workers: int) -> bool:
        """If there is one; else each holds old values of what the others train, until an epoch is over."""
        return workers == 1

    def updates_per_step(self, workers: int) -> int:
        """One: that of the mean gradient."""
        return 1

    def resharding(self, before: int, after: int) -> Resharding:
        """Layers are cut anew."""
        return OfSlices()

    def slices(self, workers: int) -> int:
        """One a worker."""
        return workers

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return HybridWorker(setting, self.scheme, self.collective)


class HybridWorker(WorkerPart):
    """Computes with the others, then updates what is its own."""

    def __init__(self, setting: WorkerSetting, scheme: Scheme, collective: Collective) -> None:
        super().__init__()
        self._setting = setting
        self._scheme = scheme
        self._collective = collective
        self._whole = True
        self._rehearsed: RehearsedPass | None = None
        self._pass: HybridPass | None = None
        flat, workers, head = setting.flat, setting.workers, setting.head
        features, *widths = head or (0,)
        ownership = Ownership.of_sizes(flat, features, widths, workers.size)
        self._update = HybridUpdate(flat, ownership, setting.plan, workers, collective)
        if head and setting.batch_size:
            trains = ownership.trunk.stop > 0
            sizes = HeadSizes(features, tuple(widths), trains, flat.vector[:0], flat.stands_for)
            self._rehearsed = RehearsedPass(sizes, workers, scheme)

    def take_parts(self, parts: Cut) -> None:
        """Finds out what is whose."""
        setting = self._setting
        ownership = Ownership.of(setting.flat, parts, setting.workers.size)
        self._pass = HybridPass(parts, setting.workers, self._scheme)
        self._update = HybridUpdate(setting.flat, ownership, setting.plan, setting.workers, self._collective)

    def start(self, step: int) -> int:
        """Takes worker 0's parameters."""
        self._setting.workers.broadcast(self._setting.flat.vector)
        return step

    def compute(self, step: Step, images: Tensor, loss: Loss) -> float:
        """Computes the trunk's own gradients and those of this worker's neurons for all."""
        assert self._pass is not None, "parts come before steps"
        return self._pass.run(images, loss, self._weight(step))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Adds the trunk's gradients up, and updates it and this worker's neurons."""
        if self._rehearsed is not None:
            self._rehearsed.run(round(step.weight * self._setting.batch_size))
        weight, stop = self._update.update(self._weight(step), learning_rate, stop=step.stop)
        if weight > 0:
            self._whole = False
            self.staleness[0] += self._setting.workers.rank == 0  # one update of all together
        return stop

    def settle(self) -> None:
        """Takes the neurons of all others, who do so at the same step."""
        if not self._whole:
            self._update.gather()
        self._whole = True

    def end(self) -> None:
        """Makes the model whole."""
        self.settle()

    def state(self) -> State:
        """Gives the state of this worker's optimisers."""
        return self._update.state()

    def load_state(self, state: State) -> None:
        """Takes back the state of this worker's optimisers."""
        self._update.load_state(*state)

    def _weight(self, step: Step) -> float:
        alone = self._setting.workers.size == 1 and step.weight > 0
        return 1.0 if alone else step.weight  # who is alone has nothing to weigh a ragged batch against
