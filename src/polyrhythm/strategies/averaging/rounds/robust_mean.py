"""Combination of a group's models by an aggregator that tolerates wrong ones, in place of their mean.

    x' = A(x_1, ..., x_N)      x_i: member i's model; A: the aggregator

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
arXiv 1803.01498, have trimmed mean and median of models; Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning
with Adversaries: Byzantine Tolerant Gradient Descent", NIPS 2017, Krum. A shift of all models shifts the result of any
of these aggregators, so models can be combined as gradients are. Every member receives all models, and each model
counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.log import Result
from polyrhythm.strategies.aggregator import Aggregator, in_order, middle, squared_distances
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.state import Conversion, State
from polyrhythm.training.flat_parameters import FlatParameters


class RobustModelMean(ModelMean):
    """`ModelMean` with an aggregator.

    Args:
        group: communicator of the members; all must call at the same steps.
        flat: parameters of this member.
        collective: algorithm that sums further vectors.
        aggregator: combination of the models.
    """

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective, aggregator: Aggregator
    ) -> None:
        super().__init__(group, flat, collective)
        self._group, self._aggregator = group, aggregator

    def over(self, group: Communicator) -> RobustModelMean:
        return RobustModelMean(group, self._flat, self._sum.passed_on(), self._aggregator)

    def take(self, stop: bool, weight: float = 1.0) -> Result:
        """Return the combination of all models that are no copies, of too few their median; see `ModelMean.take`."""
        if self.size == 1:
            return super().take(stop, weight)
        models, stops = self._gathered(stop, weight)
        if not models:
            return Result(None, 0.0, stops)
        few = len(models) < self._aggregator.least
        vector = middle(in_order(models)) if few else combined(self._aggregator, models)
        return Result(vector, float(len(models)), stops)

    def at_end(self, beginning: Tensor | None, step: int, stop: bool, weight: float) -> Result:
        """Return the combination at the end of a round; a round with too few models has no effect."""
        if beginning is None or self.size == 1:
            return self.take(stop, weight)
        models, stops = self._gathered(stop, weight)
        if not models:
            return Result(None, 0.0, stops)
        few = len(models) < self._aggregator.least
        vector = beginning.clone() if few else combined(self._aggregator, models)
        return Result(vector, float(len(models)), stops)

    def _gathered(self, stop: bool, weight: float) -> tuple[list[Tensor], bool]:
        """Return all members' models of a weight above 0, and whether any member has received a stop request."""
        own = self._flat.vector_and_tail.clone()
        own[self._flat.size :] = own.new_tensor([weight, float(stop)])
        received = [own if rank == self._group.rank else torch.empty_like(own) for rank in range(self.size)]
        for rank, model in enumerate(received):
            self._group.broadcast(model, rank)
        models = [model[: self._flat.size] for model in received if float(model[-2]) > 0]
        return models, any(float(model[-1]) > 0 for model in received)


def combined(aggregator: Aggregator, models: Sequence[Tensor]) -> Tensor:
    """Return the combination of models, `(size,)` each; at least as many as the aggregator needs."""
    distances = squared_distances(models) if aggregator.whole else None
    return aggregator.aggregate(models, [1.0] * len(models), distances)


def robust_resharding(rounds: Resharding, aggregator: Aggregator) -> Resharding:
    """Return the resharding of rounds with models that an aggregator combines.

    Args:
        rounds: resharding with the mean of all models.
        aggregator: combination of the models.
    """

    def merge(name: str, states: Sequence[State], weights: Sequence[float]) -> State:
        models = [tensors[name] for (tensors, _), weight in zip(states, weights, strict=True) if weight > 0]
        few = len(models) < aggregator.least
        return {name: middle(in_order(models)) if few else combined(aggregator, models)}, {}

    assert isinstance(rounds.workers, tuple), "rounds have fields"
    fields = [
        replace(each, conversion=Conversion(merge, "run")) if each.name == "vector" else each
        for each in rounds.workers
    ]
    text = f"all continue from what {aggregator} makes of {{states}} models, and from their optimizers' mean momenta"
    return replace(rounds, workers=tuple(fields), text=text)
