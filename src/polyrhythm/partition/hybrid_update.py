"""The update that follows a hybrid pass: the trunk's gradients are added up, the head's are whole already.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section 4.

    trunk      w' = w - lr * sum_i w_i g_i / sum_i w_i       w_i g_i from worker i's pass: one all-reduce
    slice s    w' = w - lr * g_s / sum_i w_i                 g_s from the pass of worker s: not added up again

Each worker keeps optimiser state for the trunk and its own slice only. The network on a worker is whole only after
`gather`: until then its slices of others are what they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.partition.activations import Activations
from polyrhythm.partition.ownership import Ownership
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizing.optimizer_kinds import LAYERWISE
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizing.recut_optimizer import recut_optimizer


def check_elementwise(plan: OptimizerPlan, workers: int) -> None:
    """Refuses an optimiser that looks at whole layers, of which each of several workers has slices only.

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
        trunk, pieces = self._ownership.trunk, self._ownership.pieces(group.rank)
        # One piece where a worker is alone: the very optimiser of the plain network.
        self._pieces = [slice(0, flat.size)] if group.size == 1 else [trunk, *pieces]
        self._optimizers = [
            plan.part(piece.start, piece.stop).build(flat.vector[piece]) for piece in self._pieces
        ]
        self._summed = flat.vector.new_zeros(trunk.stop + 2)

    def update(self, weight: float, learning_rate: float, *, stop: bool = False) -> tuple[float, bool]:
        """Updates the trunk and this worker's slices by the gradients of a pass, and zeroes these.

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
        """Gives the state of this worker's optimisers, as named tensors and JSON-able facts."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"pieces": [[piece.start, piece.stop] for piece in self._pieces]}
        for number, optimizer in enumerate(self._optimizers):
            named, facts[str(number)] = optimizer.state()
            tensors |= {f"{number}.{name}": value for name, value in named.items()}
        return tensors, facts

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `state` gave, or what others gave of all their pieces, which are `slices` of the vector."""
        if "slices" in facts:
            self._take_from(tensors, facts["slices"])
            return
        for number, optimizer in enumerate(self._optimizers):
            optimizer.load_state(_below(f"{number}.", tensors), facts[str(number)])

    def _take_from(self, tensors: dict[str, Tensor], slices: list[tuple[int, int, dict[str, Any]]]) -> None:
        given = sorted((start, stop, number, told) for number, (start, stop, told) in enumerate(slices))
        packed = [(_below(f"{number}.", tensors), told) for _, _, number, told in given]
        before = [slice(start, stop) for start, stop, _, _ in given]
        for piece, optimizer in zip(self._pieces, self._optimizers, strict=True):
            if piece.start < piece.stop:
                optimizer.load_state(*recut_optimizer(packed, self._plan, before, piece))

    def gather(self) -> None:
        """Makes the network whole on all workers."""
        self._ownership.gather(self._activations)

    def _mean(self, weight: float, stop: bool) -> tuple[float, bool]:
        if self._activations.size > 1:
            weight, stop = self._add_up(weight, stop)
        if weight > 0 and weight != 1:
            self._flat.gradients.div_(weight)
        return weight, stop

    def _add_up(self, weight: float, stop: bool) -> tuple[float, bool]:
        gradients, summed = self._flat.gradients[self._ownership.trunk], self._summed
        summed[:-2].copy_(gradients)
        summed[-2:].copy_(_pair(summed, weight, float(stop)))
        self._sum.run(summed)
        gradients.copy_(summed[:-2])
        whole, stops = summed[-2:].tolist()
        return whole, stops > 0


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _pair(like: Tensor, first: float, second: float) -> Tensor:
    return torch.tensor([first, second], dtype=like.dtype, device=like.device)
