"""What an adversary is: a worker that sends something else than the gradient that it has computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import ClassVar, Protocol

from torch import Tensor

from polyrhythm.specs import Config

ADVERSARIES = "polyrhythm.simulation.injection.adversaries"


class Attack(Protocol):
    """One adversary, and what it has seen so far of one server's shard."""

    def __call__(self, gradient: Tensor, random: Random, /) -> Tensor:
        """Gives what is sent instead of a gradient.

        Args:
            gradient: `(n,)`, as it was computed; not changed.
            random: the adversary's own stream.

        Returns:
            `(n,)`, of the same dtype.
        """


class Adversary(Config):
    """A way to attack, and the maker of its attacks.

    Attributes:
        colludes: whether those who attack together look at each other's gradients first, with `agree`.
    """

    colludes: ClassVar[bool] = False

    @abstractmethod
    def attack(self) -> Attack:
        """Makes an attack that has seen nothing yet."""

    def agree(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gives what all of several that attack together send, `(n,)`, where they collude.

        Args:
            gradients: of the same step, as they were computed, each `(n,)`; not changed.
        """
        raise NotImplementedError
