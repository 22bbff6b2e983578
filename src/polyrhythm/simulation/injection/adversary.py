"""Adversaries: workers that send something else than the gradient that they have computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import ClassVar

from torch import Tensor

from polyrhythm.specs import Config

ADVERSARIES = "polyrhythm.simulation.injection.adversaries"


Attack = Callable[[Tensor, Random], Tensor]
"""One adversary's attack on one server's shard, which may remember what it has seen: it takes the gradient `(n,)` as it
was computed, which it does not change, and the adversary's own stream, and returns what is sent instead."""


class Adversary(Config):
    """A kind of attack.

    Attributes:
        colludes: whether joint attackers see each other's gradients first, in `agree`.
    """

    colludes: ClassVar[bool] = False

    @abstractmethod
    def attack(self) -> Attack:
        """Return an attack that has seen nothing yet."""

    def agree(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the vector that several colluding attackers all send, `(n,)`.

        Args:
            gradients: gradients of the same step, as they were computed, each `(n,)`; not changed.
        """
        raise NotImplementedError
