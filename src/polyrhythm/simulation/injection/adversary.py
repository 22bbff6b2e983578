"""Adversaries: workers that send something else than the gradient that they have computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import ClassVar, Protocol

from torch import Tensor

from polyrhythm.specs import Config

ADVERSARIES = "polyrhythm.simulation.injection.adversaries"


class Attack(Protocol):
    """One adversary's attack on one server's shard, with what it has seen so far."""

    def __call__(self, gradient: Tensor, random: Random, /) -> Tensor:
        """Return what is sent instead of a gradient.

        Args:
            gradient: `(n,)`, as it was computed; not changed.
            random: the adversary's own stream.

        Returns:
            `(n,)`, of the same dtype.
        """


class Adversary(Config):
    """A kind of attack.

    Attributes:
        colludes: whether those who attack together see each other's gradients first, in `agree`.
    """

    colludes: ClassVar[bool] = False

    @abstractmethod
    def attack(self) -> Attack:
        """Return an attack that has seen nothing yet."""

    def agree(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return what all of several colluding attackers send, `(n,)`.

        Args:
            gradients: of the same step, as they were computed, each `(n,)`; not changed.
        """
        raise NotImplementedError
