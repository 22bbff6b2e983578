"""Hybrid model and data parallelism: data-parallel convolutions, fully connected layers partitioned by neurons.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section
4; Wu, Yan, Shan, Dang, Sun, "Deep Image", 2015, arXiv 1501.02876, section 3.2.

    trunk      w' = w - lr * sum_i b_i g_i / sum_i b_i     g_i worker i's mean gradient; summed by an all-reduce
    slice s    w' = w - lr * sum_i b_i g_is / sum_i b_i    computed by worker s from all workers' samples

b_i = samples in worker i's batch, s = the neurons of one worker. The result is that of one large batch, with any
`scheme`. The computation of the fully connected layers and their updates are divided among the workers, and so is their
memory: parameters, gradients and optimizer state of a slice are on its owner only. The network is whole on worker 0
alone, from `settle`, at the end of every epoch, to the next step: it tests and saves it, without gradients.

M_c and M_fc = bytes of the trunk and of the fully connected layers, A = bytes of one sample's features where the
network is cut, b = samples in a worker's batch.

With `trunk=channels` or `height` the convolutions are partitioned as well (`partition/divided_trunk.py`). By channels,
each worker trains its own output channels, as with fully connected layers. By height, all workers train all filters,
from the sum of the weight gradients of all rows, and each keeps only the activations of its own rows. All samples of a
round (`scheme`) pass the trunk together, and partitioned batch-norm layers normalize over all of them: the result is
that of one batch per round.

The pass (`partition/hybrid_pass.py`) leaves sum_i b_i g_is on worker s, so only the trunk's gradients are summed
afterwards.

In a `treenet`, branches are partitioned instead of neurons (`partition/branches.py`): worker k computes and trains
complete branches for the samples of all workers, and returns their logits to the worker that owns the samples.

A resumed run with another number of workers joins the optimizer states, and cuts them at the new slice boundaries:

    before    trunk of worker 0 | slice of worker 0 | of 1 | of 2 | …        joined: the whole vector
    after     every worker receives all states, and loads those of its own slices

Departures from the paper:

- The head is updated once per step, never after every round.
- The slices are collected by worker 0 only at the end of an epoch.
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
from polyrhythm.partition.divided_trunk import Trunk
from polyrhythm.partition.hybrid_pass import Loss, Scheme
from polyrhythm.partition.ownership import Division, Ownership
from polyrhythm.partition.parameter_transfer import ParameterTransfer
from polyrhythm.specs import chosen
from polyrhythm.strategies.divided_network import CutsNetwork
from polyrhythm.strategies.resharding import Held, Resharding
from polyrhythm.strategies.state import Part, State, StateField, below, prefixed
from polyrhythm.strategies.strategy import Facts, Paper, Strategy, Traits
from polyrhythm.strategies.worker_part import Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_optimizer import LAYERWISE
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizer_state import recut_optimizer
from polyrhythm.training.stage_parameters import StageParameters


class Hybrid(Strategy):
    """All workers average the gradients of the convolutions, and each trains its own neurons of the layers after them.

    Attributes:
        scheme: samples that pass the fully connected layers together: `a` those of all workers, `b` those of one worker
            after another, `c` an equal share of every worker's.
        trunk: treatment of the layers before the fully connected ones. `copied`: every worker has all of them, for its
            own samples. `channels`: each worker has some output channels of every convolution, for all samples.
            `height`: each worker computes some rows of all images, and border rows are exchanged.
        collective: algorithm that sums the gradients of the convolutions.
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
        "its workers exchange activations, and the next batch cannot correct their compression errors: use "
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
        return Traits(local_models=workers > 1, slices=workers, trunk=self.trunk)

    def resharding(self, before: int, after: int) -> Resharding:
        text = "all continue from worker 0's parameters, and layers and their optimizer states are cut again"
        return Resharding(after=after, text=text, workers=lambda held, step: _joined(held, after))

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return HybridWorker(setting, self.scheme, self.collective)


class HybridWorker(CutsNetwork):
    """Computes a step together with the other workers, then updates the trunk and its own slices."""

    fields = (StateField("", Part, at="_update"),)

    def __init__(self, setting: WorkerSetting, scheme: Scheme, collective: Collective) -> None:
        super().__init__()
        self._setting = setting
        self._scheme = scheme
        self._collective = collective
        self._whole, self._suspended = True, False
        workers = setting.workers
        self._transfer = ParameterTransfer(
            workers.subgroup("network", range(workers.size)) if workers.size > 1 else workers
        )

    def divide(self, division: Division) -> None:
        setting, workers = self._setting, self._setting.workers
        self._pass = division.passes(workers, self._scheme)
        self._own, self._ownership = division.own, division.ownership
        self._update = HybridUpdate(division.own, division.ownership, setting.plan, workers, self._collective)

    def start(self, step: int) -> int:
        """Take the parameters of this worker from worker 0, which has the whole network."""
        workers, own = self._setting.workers, self._own
        if workers.rank > 0:
            self._transfer.receive(0, own.own())
        elif workers.size > 1:
            own.take()
            self._transfer.hand_out([own.of_rank(worker) for worker in range(workers.size)])
        return step

    def compute(self, step: Step, images: Tensor, loss: Loss) -> float:
        if self._whole:
            if self._suspended:
                self._own.resume()
            self._own.release()
            self._own.allocate_gradients()
            self._whole = self._suspended = False
        return self._pass.run(images, loss, self._weight(step))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        weight, stop = self._update.update(self._weight(step), learning_rate, stop=step.stop)
        self.staleness[0] += weight > 0
        return stop

    def settle(self) -> None:
        """Make the network whole on worker 0; all must call it at the same step."""
        if not self._whole:
            self._pass.complete()
            self._gather()
        self._whole = True

    def end(self) -> None:
        self.settle()

    def _gather(self) -> None:
        workers, ownership, own = self._setting.workers, self._ownership, self._own
        if workers.size == 1:
            return
        self._transfer.number += 1
        if workers.rank > 0:
            pieces = [own.flat.vector[own.place_of(piece)] for piece in ownership.pieces(workers.rank)]
            for handle in self._transfer.send(0, pieces):
                handle.wait()
            return
        own.allocate()
        own.suspend()
        self._suspended = True
        whole = self._setting.flat.vector
        for worker in range(1, workers.size):
            self._transfer.receive(worker, [whole[piece] for piece in ownership.pieces(worker)])

    def _weight(self, step: Step) -> float:
        alone = self._setting.workers.size == 1 and step.weight > 0
        return 1.0 if alone else step.weight  # a single worker needs no weight for a partial batch


def check_elementwise(plan: OptimizerPlan, workers: int) -> None:
    """Reject an optimizer that needs whole layers, since each of several workers has only slices.

    Raises:
        RequestError: the optimizer needs whole layers.
    """
    if workers > 1 and plan.kind in LAYERWISE:
        raise RequestError(
            f"{plan.kind} looks at whole layers, and hybrid parallelism cuts them: use an elementwise "
            "optimizer, such as sgd or adam"
        )


class HybridUpdate:
    """Updates of one worker. All workers must call `update` after each of their passes.

    Args:
        own: parameters and gradients of this worker.
        ownership: ownership of the network's parameters.
        plan: plan of the optimizer.
        group: communicator of the workers.
        collective: algorithm that sums the trunk's gradients.

    Raises:
        RequestError: the optimizer needs whole layers.
    """

    def __init__(
        self,
        own: StageParameters,
        ownership: Ownership,
        plan: OptimizerPlan,
        group: Communicator,
        collective: Collective,
    ) -> None:
        check_elementwise(plan, group.size)
        flat = self._flat = own.flat
        self._plan = plan
        self._workers = group.size
        self._sum = AllReduce(collective, group, "trunk")
        # A single worker has one piece: the same optimizer as without partitioning.
        shared = [slice(0, flat.size)] if group.size == 1 else ownership.shared
        self._pieces = shared if group.size == 1 else [*shared, *ownership.pieces(group.rank)]
        self._places = [own.place_of(piece) for piece in self._pieces]
        self._shared = self._places[: len(shared)]
        self._optimizers = [
            plan.part(piece.start, piece.stop).build(flat.vector[place])
            for piece, place in zip(self._pieces, self._places, strict=True)
        ]
        self._summed = flat.vector.new_zeros(sum(each.stop - each.start for each in self._shared) + 2)

    def update(self, weight: float, learning_rate: float, *, stop: bool = False) -> tuple[float, bool]:
        """Update the trunk and this worker's slices with the gradients of a pass, then zero the gradients.

        Args:
            weight: weight of this worker's batch, as in the pass.
            learning_rate: learning rate of the update.
            stop: whether this worker has received a stop request.

        Returns:
            The sum of all workers' weights (0: nothing is updated), and whether any worker has received a stop request;
            the same on all workers.
        """
        whole, stopping = self._mean(weight, stop)
        if whole > 0:
            for place, optimizer in zip(self._places, self._optimizers, strict=True):
                optimizer.step(self._flat.gradients[place], learning_rate)
        self._flat.zero_gradients()
        return whole, stopping

    def state(self) -> State:
        """Return the state of this worker's optimizers, as named tensors and JSON-serializable values."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {
            "pieces": [[piece.start, piece.stop] for piece in self._pieces],
            "shared": len(self._shared),
        }
        for number, optimizer in enumerate(self._optimizers):
            named, facts[str(number)] = optimizer.state()
            tensors |= prefixed(f"{number}.", named)
        return tensors, facts

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, or the joined states of all workers, with the `slices` of their pieces."""
        tensors, facts = state
        if "slices" in facts:
            self._take_from(tensors, facts["slices"])
            return
        for number, optimizer in enumerate(self._optimizers):
            optimizer.load_state((below(f"{number}.", tensors), facts[str(number)]))

    def _take_from(self, tensors: dict[str, Tensor], slices: list[tuple[int, int, dict[str, Any]]]) -> None:
        given = sorted((start, stop, number, stated) for number, (start, stop, stated) in enumerate(slices))
        packed = [(below(f"{number}.", tensors), stated) for _, _, number, stated in given]
        before = [slice(start, stop) for start, stop, _, _ in given]
        for piece, optimizer in zip(self._pieces, self._optimizers, strict=True):
            if piece.start < piece.stop:
                optimizer.load_state(recut_optimizer(packed, self._plan, before, piece))

    def _mean(self, weight: float, stop: bool) -> tuple[float, bool]:
        if self._workers > 1:
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
            # The shared pieces are the same on all workers: those of worker 0 are enough.
            if start == stop or (number < facts.get("shared", 1) and worker > 0):
                continue
            tensors |= prefixed(f"{len(slices)}.", below(f"{number}.", own))
            slices.append([start, stop, facts[str(number)]])
    return dict.fromkeys(range(workers), (tensors, {"slices": slices}))
