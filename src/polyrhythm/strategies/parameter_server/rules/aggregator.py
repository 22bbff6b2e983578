"""Aggregators: how several gradients become the one that is applied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

AGGREGATORS = "polyrhythm.strategies.parameter_server.aggregators"


class Aggregator(Config):
    """An aggregator's configuration, and its rule.

    Attributes:
        robust: whether it bears gradients that are arbitrarily wrong. Then every gradient has one vote, since weights
            are what their senders say.
        whole: whether it needs the distances between whole gradients, which servers then add up over their shards.
    """

    robust: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    @property
    @abstractmethod
    def least(self) -> int:
        """How many gradients it needs at least; of fewer, no update is made."""

    def check(self, gradients: int) -> None:
        """Refuses to make an update of too few gradients.

        Args:
            gradients: of which every update is made.

        Raises:
            RequestError: there are too few, with the number that is needed.
        """
        if gradients < self.least:
            raise RequestError(
                f"{self} needs at least {self.least} gradients an update, and there are {gradients}: ask for "
                f"{self.least} workers that go in step, or for a smaller {self.strength}"
            )

    def spares(self, gradients: int) -> int:
        """Gives how many may be missing of the gradients of which every update is made: all, if it need not choose."""
        return max(0, gradients - self.least) if self.robust else gradients

    @property
    def strength(self) -> str:
        """The key that says how many wrong gradients it bears."""
        return "f"

    @abstractmethod
    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        """Makes one gradient of several.

        Args:
            gradients: each `(n,)`, a shard's part, in the order of their pushers; not changed.
            weights: samples behind each.
            distances: `(k, k)`, float64, squared distances between the whole gradients, where they are needed; not a
                number on the diagonal where a gradient is not finite.

        Returns:
            `(n,)`.
        """


def mean(gradients: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Gives the weighted mean, `(n,)`; a single gradient is its own mean.

    Args:
        gradients: each `(n,)`, summed in their order; not looked at where they weigh nothing.
        weights: of each, in all more than 0; default: all alike.
    """
    if len(gradients) == 1:
        return gradients[0]
    total = torch.zeros_like(gradients[0])
    weight = total.new_zeros(())  # in the gradients' dtype, where an all-reduce adds the weights up as well
    for gradient, own in zip(gradients, weights or [1.0] * len(gradients), strict=True):
        weight.add_(own)
        if own == 1.0:
            total.add_(gradient)
        elif own > 0:
            total.add_(gradient * own)
    return total.div_(weight)
