"""Hybrid model and data parallelism: convolutions data parallel, fully connected layers cut by their neurons.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section
4; Wu, Yan, Shan, Dang, Sun, "Deep Image", 2015, arXiv 1501.02876, section 3.2.

    trunk      w' = w - lr * sum_i b_i g_i / sum_i b_i     g_i worker i's mean gradient, by an all-reduce
    slice s    w' = w - lr * sum_i b_i g_is / sum_i b_i    computed by worker s from all workers' examples

b_i = samples in worker i's batch, s = the neurons of one worker. The result is that of one large batch,
whatever the `scheme`. Workers share the computation of the fully connected layers, the state of their
optimiser and their updates. They do not share the memory for their parameters and gradients, so that any
worker can be tested and saved.

M_c and M_fc = the bytes of the trunk and of the fully connected layers, A = the bytes of one example's
features where the network is cut, b = the samples in a worker's batch.

With `trunk=channels` or `height` the convolutions are cut as well (`partition/divided_trunk.py`): by channels each
worker trains its own, as of the fully connected layers; by height all train all, from the sum of what every worker's
rows give, and each keeps activations of its rows alone. All examples of a round (`scheme`) pass them together, and are
normalised together by layers of batch normalisation that are cut: the result is that of one batch a round.

The pass (`partition/hybrid_pass.py`) leaves sum_i b_i g_is on worker s, so only the trunk's gradients are
added up afterwards. Each worker keeps optimiser state for the trunk and its own slices only. The network on a
worker is whole only after `gather`: until then it holds old values of the other workers' slices.

Of a `treenet` it is branches that are shared out, in place of neurons (`partition/branches.py`): worker k computes and
trains its branches whole, for the examples of all workers, and whose examples they are gets all branches' logits.

With another number of workers the optimisers' states are put together, and cut where the slices are now:

    before    trunk of worker 0 | slice of worker 0 | of 1 | of 2 | …        together the whole vector
    after     every worker is given all of them, and takes what belongs to its own slices

Departures from the paper:

- The head is updated once a step, never after every round.
- The slices are exchanged among all workers at the end of an epoch only.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.partition.activations import Activations
from polyrhythm.partition.divided_trunk import Trunk
from polyrhythm.partition.hybrid_pass import Loss, Scheme
from polyrhythm.partition.ownership import Division, Ownership
from polyrhythm.specs import chosen
from polyrhythm.strategies.state import Held, Resharding, State, below, prefixed
from polyrhythm.strategies.strategy import Facts, Paper, Strategy, Traits
from polyrhythm.strategies.worker_part import CutsNetwork, Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_optimizer import LAYERWISE
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizer_state import recut_optimizer


class Hybrid(Strategy):
    """All workers average the gradients of convolutions, and each trains its own neurons of the layers after them.

    Attributes:
        scheme: which examples pass the fully connected layers together: `a` all, `b` one worker's after another's, `c`
            an equal share of every worker's.
        trunk: the layers before these. `copied`: every worker has them, for its own examples. `channels`: each has
            some output channels of every convolution, for all examples. `height`: each computes some rows of all
            pictures, with borders that are exchanged.
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
        bytes_per_step="2M_c(N-1)/N + 2(N-1)bA, and outputs of hidden layers (trunk=channels: of all; height: borders)",
        staleness="0",
        use_it="convolutions followed by large fully connected layers (alexnet, deep_image), while 4bAN < M_fc",
    )
    why_not_compressed: ClassVar[str] = (
        "its workers exchange activations, of which nothing can be made up for with the next batch: use "
        "synchronous"
    )

    scheme: Scheme = "a"
    trunk: Trunk = "copied"
    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if plan is not None:
            check_elementwise(plan, workers)

    def traits(self, workers: int) -> Traits:
        return Traits(local_models=workers > 1, slices=workers, cuts_network=True, trunk=self.trunk)

    def resharding(self, before: int, after: int) -> Resharding:
        text = "all go on from worker 0's parameters, and layers are cut anew with their optimisers' states"
        return Resharding(after=after, text=text, workers=lambda held, step: _joined(held, after))

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return HybridWorker(setting, self.scheme, self.collective)


class HybridWorker(WorkerPart, CutsNetwork):
    """Computes with the others, then updates what is its own."""

    def __init__(self, setting: WorkerSetting, scheme: Scheme, collective: Collective) -> None:
        super().__init__()
        self._setting = setting
        self._scheme = scheme
        self._collective = collective
        self._whole = True

    def divide(self, division: Division) -> None:
        setting, workers = self._setting, self._setting.workers
        self._pass = division.passes(workers, self._scheme)
        self._update = HybridUpdate(setting.flat, division.ownership, setting.plan, workers, self._collective)

    def start(self, step: int) -> int:
        self._setting.workers.broadcast(self._setting.flat.vector)
        return step

    def compute(self, step: Step, images: Tensor, loss: Loss) -> float:
        return self._pass.run(images, loss, self._weight(step))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        weight, stop = self._update.update(self._weight(step), learning_rate, stop=step.stop)
        if weight > 0:
            self._whole = False
            self.staleness[0] += 1
        return stop

    def settle(self) -> None:
        """Gather the neurons of all workers, who must do so at the same step."""
        if not self._whole:
            self._update.gather()
            self._pass.complete()
        self._whole = True

    def end(self) -> None:
        self.settle()

    def state(self) -> State:
        return self._update.state()

    def load_state(self, state: State) -> None:
        self._update.load_state(*state)

    def _weight(self, step: Step) -> float:
        alone = self._setting.workers.size == 1 and step.weight > 0
        return 1.0 if alone else step.weight  # who is alone has nothing to weigh a ragged batch against


def check_elementwise(plan: OptimizerPlan, workers: int) -> None:
    """Refuse an optimiser that looks at whole layers, of which each of several workers has slices only.

    Raises:
        RequestError: so it does.
    """
    if workers > 1 and plan.kind in LAYERWISE:
        raise RequestError(
            f"{plan.kind} looks at whole layers, and hybrid parallelism cuts them: use an optimiser that treats "
            "every number alike, such as sgd or adam"
        )


class HybridUpdate:
    """One worker's updates. All workers must call it after each of their passes.

    Args:
        flat: the network's parameters and gradients.
        ownership: of its numbers.
        plan: of the optimiser.
        group: the workers.
        collective: how the trunk's gradients are added up.

    Raises:
        RequestError: the optimiser looks at whole layers, of which a worker has slices only.
    """

    def __init__(
        self,
        flat: FlatParameters,
        ownership: Ownership,
        plan: OptimizerPlan,
        group: Communicator,
        collective: Collective,
    ) -> None:
        check_elementwise(plan, group.size)
        self._flat = flat
        self._plan = plan
        self._activations = Activations(group, "slices")
        self._sum = AllReduce(collective, group, "trunk")
        self._ownership = ownership
        self._shared = [slice(0, flat.size)] if group.size == 1 else self._ownership.shared
        # One piece where a worker is alone: the very optimiser of the plain network.
        self._pieces = (
            self._shared if group.size == 1 else [*self._shared, *self._ownership.pieces(group.rank)]
        )
        self._optimizers = [
            plan.part(piece.start, piece.stop).build(flat.vector[piece]) for piece in self._pieces
        ]
        self._summed = flat.vector.new_zeros(sum(each.stop - each.start for each in self._shared) + 2)

    def update(self, weight: float, learning_rate: float, *, stop: bool = False) -> tuple[float, bool]:
        """Update the trunk and this worker's slices by the gradients of a pass, and zero these.

        Args:
            weight: as the pass was given it.
            learning_rate: to update with.
            stop: whether this worker was asked to stop.

        Returns:
            The weight of all workers' examples, without any of which nothing is updated, and whether any was asked to
            stop: the same on all.
        """
        whole, stopping = self._mean(weight, stop)
        if whole > 0:
            for piece, optimizer in zip(self._pieces, self._optimizers, strict=True):
                optimizer.step(self._flat.gradients[piece], learning_rate)
        self._flat.zero_gradients()
        return whole, stopping

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of this worker's optimizers, as named tensors and JSON-able facts."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {
            "pieces": [[piece.start, piece.stop] for piece in self._pieces],
            "shared": len(self._shared),
        }
        for number, optimizer in enumerate(self._optimizers):
            named, facts[str(number)] = optimizer.state()
            tensors |= prefixed(f"{number}.", named)
        return tensors, facts

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `state` returned, or the union of others' states, whose pieces are `slices` of the vector."""
        if "slices" in facts:
            self._take_from(tensors, facts["slices"])
            return
        for number, optimizer in enumerate(self._optimizers):
            optimizer.load_state(below(f"{number}.", tensors), facts[str(number)])

    def _take_from(self, tensors: dict[str, Tensor], slices: list[tuple[int, int, dict[str, Any]]]) -> None:
        given = sorted((start, stop, number, told) for number, (start, stop, told) in enumerate(slices))
        packed = [(below(f"{number}.", tensors), told) for _, _, number, told in given]
        before = [slice(start, stop) for start, stop, _, _ in given]
        for piece, optimizer in zip(self._pieces, self._optimizers, strict=True):
            if piece.start < piece.stop:
                optimizer.load_state(*recut_optimizer(packed, self._plan, before, piece))

    def gather(self) -> None:
        """Complete the network on all workers."""
        self._ownership.gather(self._activations)

    def _mean(self, weight: float, stop: bool) -> tuple[float, bool]:
        if self._activations.size > 1:
            weight, stop = self._add_up(weight, stop)
        if weight > 0 and weight != 1:
            self._flat.gradients.div_(weight)
        return weight, stop

    def _add_up(self, weight: float, stop: bool) -> tuple[float, bool]:
        summed = self._summed
        sizes = [each.stop - each.start for each in self._shared]
        parts = list(zip(self._shared, summed[:-2].split(sizes), strict=True))
        for piece, part in parts:
            part.copy_(self._flat.gradients[piece])
        summed[-2:].copy_(_pair(summed, weight, float(stop)))
        self._sum.run(summed)
        for piece, part in parts:
            self._flat.gradients[piece].copy_(part)
        whole, stops = summed[-2:].tolist()
        return whole, stops > 0


def _pair(like: Tensor, first: float, second: float) -> Tensor:
    return torch.tensor([first, second], dtype=like.dtype, device=like.device)


def _joined(held: Held, workers: int) -> dict[int, State]:
    tensors: dict[str, Tensor] = {}
    slices: list[list[Any]] = []
    for worker in sorted(held.workers):
        own, facts = held.workers[worker]
        for number, (start, stop) in enumerate(facts["pieces"]):
            # What all train alike is everybody's.
            if start == stop or (number < facts.get("shared", 1) and worker > 0):
                continue
            tensors |= prefixed(f"{len(slices)}.", below(f"{number}.", own))
            slices.append([start, stop, facts[str(number)]])
    return dict.fromkeys(range(workers), (tensors, {"slices": slices}))
