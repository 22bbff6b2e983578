"""The mean of a group's models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.training.flat_parameters import FlatParameters


@dataclass(frozen=True)
class Mean:
    """What a group's models come to.

    Attributes:
        vector: `(size,)`, in memory of its own; this member's own model if nobody's counts.
        weight: how many models count.
        stop_requested: whether any member was asked to stop.
    """

    vector: Tensor
    weight: float
    stop_requested: bool


class ModelMean:
    """Averages the members' flat vectors: every model that counts does so equally, whatever its batches were.

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
        """Makes the mean of others' models; what is known of the links goes with it."""
        return ModelMean(group, self._flat, self._sum.passed_on())

    def prepare(self) -> None:
        """Lets the collective look at the links, if it wants to; all members must call it before the first mean."""
        if self.size > 1:
            self._sum.prepare()

    def take(self, stop: bool, weight: float = 1.0) -> Mean:
        """Gives the mean of all models as they are, which stay as they are.

        Args:
            stop: whether this member wants to stop.
            weight: 0 if this member's model is somebody else's, else 1.
        """
        whole, size = self._flat.vector_and_tail.clone(), self._flat.size
        vector, tail = whole[:size], whole[size:]
        if self.size == 1:
            return Mean(vector, weight, stop)
        if weight != 1.0:
            vector.mul_(weight)
        tail.copy_(tail.new_tensor([weight, float(stop)]))
        self._sum.run(whole)
        total, stops = tail.tolist()
        if total > 0:
            vector.div_(total)
        else:
            vector.copy_(self._flat.vector)
        return Mean(vector, total, stops > 0)

    def average(self, tensor: Tensor, weight: float, total: float) -> None:
        """Overwrites a tensor of the same shape on all members with its mean.

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
