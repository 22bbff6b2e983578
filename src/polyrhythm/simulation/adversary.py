"""What an adversary is: a worker that sends something else than the gradient that it has computed."""

from __future__ import annotations

from abc import abstractmethod
from random import Random
from typing import Protocol

from torch import Tensor

from polyrhythm.specs import Config

ADVERSARIES = "polyrhythm.simulation.adversaries"


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
    """A way to attack, and the maker of its attacks."""

    @abstractmethod
    def attack(self) -> Attack:
        """Makes an attack that has seen nothing yet."""
