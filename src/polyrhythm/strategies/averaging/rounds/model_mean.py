"""The plain mean of a group's models."""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.training.flat_parameters import FlatParameters


class ModelMean:
    """Averages the members' flat vectors: every model counts the same, whatever its batches were.

    The vector's tail tells of wishes to stop, so all members hear of one at the same step.

    Args:
        group: who takes part; all must call at the same steps.
        flat: whose vector.
        collective: how vectors are added up.
        name: tells these messages from others of the group.
    """

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective, name: str = "models"
    ) -> None:
        self.size = group.size
        self._flat = flat
        self._sum = AllReduce(collective, group, name)

    def prepare(self) -> None:
        """Lets the collective look at the links, if it wants to; all members must call it before the first mean."""
        if self.size > 1:
            self._sum.prepare()

    def take(self, wish: bool) -> bool:
        """Overwrites every member's vector with the mean.

        Args:
            wish: whether this member wants to stop.

        Returns:
            Whether any member does.
        """
        return wish if self.size == 1 else self._average(self._flat.vector_and_tail, wish)

    def look(self, wish: bool) -> tuple[Tensor, bool]:
        """Gives the mean, `(size,)`, as a vector of its own, and whether any member wants to stop."""
        whole = self._flat.vector_and_tail.clone()
        wished = wish if self.size == 1 else self._average(whole, wish)
        return whole[: self._flat.size], wished

    def average(self, tensor: Tensor) -> None:
        """Overwrites a tensor of the same shape on all members with its mean."""
        if self.size > 1:
            self._sum.run(tensor)
            tensor.div_(self.size)

    def _average(self, whole: Tensor, wish: bool) -> bool:
        whole[-1] = float(wish)
        self._sum.run(whole)
        whole[: self._flat.size].div_(self.size)
        return bool(whole[-1] > 0)
