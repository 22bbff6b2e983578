"""Gradients that are not finite: each is taken as that of an empty batch, and whoever sends nothing else is let go."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from polyrhythm.communication.message import Message


def is_finite(tensor: Tensor) -> bool:
    """Tells whether all numbers are finite."""
    # One pass and no memory: only where the sum of finite numbers overflows must they be looked at one by one.
    return isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


class NotFinite:
    """One server's count.

    Args:
        pushers: how many there are.
        eject_after: in a row, after which a pusher is let go; 0: never.
        looks: as kept.

    Attributes:
        total: gradients that were not finite.
        looks: whether gradients may be other than finite, so that they are to be `screened`.
    """

    def __init__(self, pushers: int, eject_after: int, *, looks: bool = True) -> None:
        self.total = 0
        self._in_a_row = [0] * pushers
        self._eject_after = eject_after
        self.looks = looks

    def screened(self, pusher: int, message: Message) -> Message:
        """Gives a push as it is, or one without weight in its place."""
        assert message.tensor is not None, "a push has been admitted"
        if message.weight == 0:
            return message
        if is_finite(message.tensor):
            self._in_a_row[pusher] = 0
            return message
        self.total += 1
        self._in_a_row[pusher] += 1
        return message._replace(tensor=torch.zeros_like(message.tensor), weight=0.0)

    def is_spent(self, pusher: int) -> bool:
        """Whether a pusher must be let go."""
        return 0 < self._eject_after <= self._in_a_row[pusher]

    def forget(self, pusher: int) -> None:
        """Begins anew, with a successor."""
        self._in_a_row[pusher] = 0
