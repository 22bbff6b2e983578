"""Mean of a group's models, and the treatment of their optimizer states at a mean.

Every worker has its own optimizer. When models are averaged, each worker keeps its optimizer state, or all take the
mean of the states, or all reset them (`AtAverage`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Sums
from polyrhythm.communication.log import Result
from polyrhythm.strategies.state import Part, StateField, Stateful
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


class ModelMean(Stateful, Sums):
    """Computes the weighted mean of the members' flat vectors. Its state is what it keeps between rounds.

    A mean is computed in separate memory, so a failed one changes no model, and the remaining members can repeat it.
    The tail of the vector carries the weight and the stop request, so all members receive a stop request at the same
    step.

    Args:
        group: communicator of the members; all must call at the same steps.
        flat: parameters of this member.
        collective: algorithm that sums the vectors.
    """

    def __init__(self, group: Communicator, flat: FlatParameters, collective: Collective) -> None:
        self.size = group.size
        self._flat = flat
        self._sum = AllReduce(collective, group, "models")

    def over(self, group: Communicator) -> ModelMean:
        """Return the same mean over other workers, with the existing measurements of the links."""
        return ModelMean(group, self._flat, self._sum.passed_on())

    def prepare(self) -> None:
        """Let the collective measure the links, if it needs to; all members must call it before the first mean."""
        if self.size > 1:
            self._sum.prepare()

    def take(self, stop: bool, weight: float = 1.0) -> Result:
        """Return the mean of all current models, which are not changed; its vector is None if all weights are 0.

        Args:
            stop: whether this member has received a stop request.
            weight: weight of this member's model; 0 if it is a copy of another member's.
        """
        whole, size = self._contribution(), self._flat.size
        vector, tail = whole[:size], whole[size:]
        if self.size == 1:
            return Result(vector, weight, stop)
        if weight != 1.0:
            vector.mul_(weight)
        tail.copy_(tail.new_tensor([weight, float(stop)]))
        self._sum.run(whole)
        total, stops = tail.tolist()
        return Result(vector.div_(total) if total > 0 else None, total, stops > 0)

    def _contribution(self) -> Tensor:
        """Return a new vector with what this member adds to the mean, and with its tail."""
        return self._flat.vector_and_tail.clone()

    def at_end(self, beginning: Tensor | None, step: int, stop: bool, weight: float) -> Result:
        """Return the mean at the end of a round; its vector is None if all weights are 0, or no model is finite.

        Args:
            beginning: starting point of the round, `(size,)`, the same on all; None: not kept.
            step: last step of the round.
            stop: whether to send a stop request; see `take`.
            weight: weight of this worker's model; see `take`.
        """
        return self.take(stop, weight)

    def commit(self) -> None:
        """Treat the last mean as complete: it was so on other members, although it failed on this one."""

    def average(self, tensor: Tensor, weight: float, total: float) -> None:
        """Overwrite a tensor of the same shape on all members with its weighted mean.

        Args:
            tensor: this member's tensor; changed in place.
            weight: weight of this member.
            total: sum of all members' weights; more than 0.
        """
        if self.size > 1:
            if weight != 1.0:
                tensor.mul_(weight)
            self._sum.run(tensor)
            tensor.div_(total)


AtAverage = Literal["keep", "average", "reset"]
"""Treatment of the optimizer state (momentum etc.) at a mean of models: each worker keeps its own, all take the mean,
or all reset it. Counters (Adam's step) are kept except by `reset`."""


class LocalOptimizer(Stateful):
    """The user's optimizer on one worker's vector.

    Args:
        plan: plan of the optimizer.
        flat: parameters that it updates.
        at_average: treatment of its state at a mean of models.

    Attributes:
        is_own: whether it is the user's own optimizer object.
    """

    fields = (StateField("", Part, at="_optimizer"),)

    def __init__(self, plan: OptimizerPlan, flat: FlatParameters, at_average: AtAverage) -> None:
        self._plan = plan
        self._flat = flat
        self._at_average = at_average
        # An averaged state must have the same layout on all workers, also where parameters had no gradient yet.
        self.is_own = plan.own is not None and at_average != "average"
        self._optimizer = plan.whole(flat.vector) if self.is_own else plan.build(flat.vector)
        self._sizes: dict[str, int] | None = None

    def step(self, learning_rate: float) -> None:
        """Update the flat vector with the flat gradients."""
        self._optimizer.step(self._flat.gradients, learning_rate)

    def mean_state(self, mean: ModelMean, weight: float, total: float) -> Tensor | None:
        """Return the packed mean of all members' states, `(n,)`; None without averaging. All members must call it.

        Args:
            mean: mean over the members.
            weight: weight of this member.
            total: sum of all members' weights.
        """
        if self._at_average != "average" or mean.size == 1 or total == 0:
            return None
        parts = self._parts()
        if not parts:  # plain SGD has no state
            return None
        packed = torch.cat([part.reshape(-1) for part in parts.values()])
        mean.average(packed, weight, total)
        return packed

    def models_averaged(self, mean_state: Tensor | None) -> None:
        """Keep, overwrite or reset the state after a mean of models.

        Args:
            mean_state: result of `mean_state`.
        """
        if self._at_average == "reset":
            if self._plan.own is not None and self.is_own:
                self._plan.own.inner.state.clear()
            else:
                self._optimizer = self._plan.build(self._flat.vector)
        elif mean_state is not None:
            parts = self._parts()
            for part, value in zip(
                parts.values(), mean_state.split([part.numel() for part in parts.values()]), strict=True
            ):
                part.copy_(value.view(part.shape))

    def _parts(self) -> dict[str, Tensor]:
        """Return the tensors of the state that can be averaged, as views of the state.

        A worker without a step so far has no state yet; its tensors are zeros.
        """
        if self._sizes is None:
            self._sizes = _sizes_of(self._plan, self._flat.vector)
        own = self._optimizer.state()[0] if self._sizes else {}
        return {
            name: own[name] if name in own else self._flat.vector.new_zeros(size)
            for name, size in self._sizes.items()
        }


def _sizes_of(plan: OptimizerPlan, vector: Tensor) -> dict[str, int]:
    """Return the sizes of the tensors of the state that can be averaged: one value per parameter value.

    They are determined by a step on a vector of zeros. Tensors of other shapes, such as a basis, are not averaged.
    """
    tried: FlatOptimizer = plan.build(torch.zeros_like(vector))
    tried.step(torch.zeros_like(vector), plan.rate)
    shapes = {parameter.shape for parameter in _parameters(tried)}
    return {
        name: tensor.numel()
        for name, tensor in sorted(tried.state()[0].items())
        if tensor.ndim > 0 and tensor.shape in shapes and tensor.is_floating_point()
    }


def _parameters(optimizer: FlatOptimizer) -> list[Tensor]:
    groups = optimizer.inner.param_groups if optimizer.inner is not None else []
    return [parameter for group in groups for parameter in group["params"]]
