"""The mean of a group's models, and what becomes of the state of their optimisers.

Every worker has an optimiser of its own. When models are averaged, each keeps its optimiser's state, or all
take the mean of the states, or all reset them (`AtAverage`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.log import Result
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


class ModelMean:
    """Averages the members' flat vectors, by their weights.

    A mean is taken in memory of its own, so one that breaks changes nobody's model, and can be taken again by those
    who are left. The vector's tail tells how many models count and of requests to stop, so all members hear of one at
    the same step.

    Args:
        group: who takes part; all must call at the same steps.
        flat: whose vector.
        collective: how vectors are added up.
    """

    def __init__(self, group: Communicator, flat: FlatParameters, collective: Collective) -> None:
        self.size = group.size
        self._flat = flat
        self._sum = AllReduce(collective, group, "models")

    def over(self, group: Communicator) -> ModelMean:
        """Return the mean over other workers, with the same measurements of the links."""
        return ModelMean(group, self._flat, self._sum.passed_on())

    def prepare(self) -> None:
        """Let the collective measure the links, if it needs to; all members must call it before the first mean."""
        if self.size > 1:
            self._sum.prepare()

    def break_off(self) -> None:
        """Give up what is under way in the background: nothing is."""

    def take(self, stop: bool, weight: float = 1.0) -> Result:
        """Return the mean of all current models, which are not changed; None if nobody's counts.

        Args:
            stop: whether this member wants to stop.
            weight: that this member's model counts; 0 if it is somebody else's.
        """
        whole, size = self._flat.vector_and_tail.clone(), self._flat.size
        vector, tail = whole[:size], whole[size:]
        if self.size == 1:
            return Result(vector, weight, stop)
        if weight != 1.0:
            vector.mul_(weight)
        tail.copy_(tail.new_tensor([weight, float(stop)]))
        self._sum.run(whole)
        total, stops = tail.tolist()
        return Result(vector.div_(total) if total > 0 else None, total, stops > 0)

    def at_end(self, beginning: Tensor | None, step: int, stop: bool, weight: float) -> Result:
        """Return the mean at the end of a round; None if nobody's model counts, or none of them is finite.

        Args:
            beginning: `(size,)`, where all began the round; None: nobody has kept it.
            step: the round's last.
            stop: as for `take`.
            weight: as for `take`.
        """
        return self.take(stop, weight)

    def commit(self) -> None:
        """Take note that the last mean was whole, although it broke for this member."""

    def state(self) -> State:
        """Return what it keeps from round to round."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""

    def average(self, tensor: Tensor, weight: float, total: float) -> None:
        """Overwrite a tensor of the same shape on all members with its mean.

        Args:
            tensor: changed in place.
            weight: of this member.
            total: of all; more than 0.
        """
        if self.size > 1:
            if weight != 1.0:
                tensor.mul_(weight)
            self._sum.run(tensor)
            tensor.div_(total)


AtAverage = Literal["keep", "average", "reset"]
"""What becomes of momentum and the like at an average of models: each worker keeps its own, all take the mean, or all
begin anew. Counters (Adam's step) are kept but by `reset`."""


class LocalOptimizer:
    """The user's optimiser on a worker's own vector.

    Args:
        plan: of the optimiser.
        flat: what it updates.
        at_average: what becomes of its state.

    Attributes:
        is_own: whether it is the user's own object.
    """

    def __init__(self, plan: OptimizerPlan, flat: FlatParameters, at_average: AtAverage) -> None:
        self._plan = plan
        self._flat = flat
        self._at_average = at_average
        # What is averaged must have one layout on all, also on those whose parameters had no gradient yet.
        self.is_own = plan.own is not None and at_average != "average"
        self._optimizer = plan.whole(flat.vector) if self.is_own else plan.build(flat.vector)
        self._sizes: dict[str, int] | None = None

    def step(self, learning_rate: float) -> None:
        """Update the flat vector with the flat gradients."""
        self._optimizer.step(self._flat.gradients, learning_rate)

    def mean_state(self, mean: ModelMean, weight: float, total: float) -> Tensor | None:
        """Return the packed mean of all members' states, if it is wanted; all must call it together.

        Args:
            mean: takes it.
            weight: of this member.
            total: of all.
        """
        if self._at_average != "average" or mean.size == 1 or total == 0:
            return None
        parts = self._parts()
        if not parts:  # plain SGD remembers nothing
            return None
        packed = torch.cat([part.reshape(-1) for part in parts.values()])
        mean.average(packed, weight, total)
        return packed

    def models_averaged(self, mean_state: Tensor | None) -> None:
        """Treat the state as asked.

        Args:
            mean_state: what `mean_state` gave.
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

    def missed_average(self, newest: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Treat the state as after an average that only others have seen.

        Args:
            newest: tensors of the state of a worker that has seen it, and may have taken further steps.
            facts: the rest of that state.
        """
        if self._at_average == "average":
            self.load_state(newest, facts)
        else:
            self.models_averaged(None)

    def state(self) -> State:
        """Return everything that a resumed optimizer needs."""
        return self._optimizer.state()

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._optimizer.load_state(tensors, facts)

    def _parts(self) -> dict[str, Tensor]:
        """Return the tensors of the state that can be averaged; those that the state has are views of it.

        Who has sat out every step so far has no state yet: it takes part with zeros.
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

    They are found by a step on a vector of zeros. What has another shape, such as a basis, stays each worker's own.
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
