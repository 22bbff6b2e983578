"""A running mean of the weights, which often tests better than the weights themselves.

Source: `tf.train.ExponentialMovingAverage` of TensorFlow 1, whose decay starts low, so that the mean soon
forgets where it began.

    d = min(decay, (1 + t) / (10 + t))
    average <- d average + (1 - d) w

t counts the updates before this one. Without the ramp, d = decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.errors import RequestError


class WeightAverage:
    """An exponential moving average of one vector.

    Args:
        weights: what the average starts as; copied.
        decay: share of the average that is kept at each update: at least 0, below 1.
        ramp: start with less than `decay`, as TensorFlow does.

    Attributes:
        value: the average; of the weights' shape, dtype and device. `update` changes it in place.
        updates: how many there have been.

    Raises:
        RequestError: the decay is out of its range.
    """

    def __init__(self, weights: Tensor, decay: float, *, ramp: bool = True) -> None:
        if not 0 <= decay < 1:
            raise RequestError(
                f"weight average: a decay of {decay} is out of range: give at least 0, less than 1"
            )
        self.value = weights.detach().clone()
        self.updates = 0
        self._decay = decay
        self._ramp = ramp

    @torch.no_grad()
    def update(self, weights: Tensor) -> None:
        """Moves the average towards the weights, which have its shape; allocates nothing."""
        if weights.shape != self.value.shape:
            raise ValueError(f"the average has shape {tuple(self.value.shape)}, not {tuple(weights.shape)}")
        # lerp is exact at both ends: equal weights change nothing, a decay of 0 takes the weights as they are
        self.value.lerp_(weights, 1 - self._next_decay())
        self.updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Gives all that a resumed average needs; `value` is the live tensor, not a copy."""
        return {"value": self.value, "updates": torch.tensor(self.updates)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes back what `state_dict` gave, by copying it."""
        self.value.copy_(state["value"])
        self.updates = int(state["updates"])

    def _next_decay(self) -> float:
        if not self._ramp:
            return self._decay
        return min(self._decay, (1 + self.updates) / (10 + self.updates))
