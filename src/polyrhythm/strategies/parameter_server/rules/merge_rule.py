"""Merge rules: how a server corrects gradients for their staleness."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyrhythm.specs import Config
from polyrhythm.strategies.state import Stateful

MERGE_RULES = "polyrhythm.strategies.parameter_server.merge"


class Merger(Stateful):
    """One server's state of a merge rule, without what pushers have seen. Pushers are numbered from 0."""

    def correct(self, pusher: int, gradient: Tensor, seen: Tensor | None, values: Tensor) -> Tensor:
        """Return the gradient as it is to be applied.

        Args:
            pusher: number of its pusher.
            gradient: `(n,)`, not changed.
            seen: `(n,)`, the parameters that the pusher was answered with, where the rule `remembers` them.
            values: `(n,)`, the parameters now, not changed.
        """
        return gradient


class MergeRule(Config):
    """A merge rule's configuration, and the maker of its mergers.

    Attributes:
        remembers: whether it needs the parameters that each pusher was answered with.
        divides: whether stale gradients count for less, so that the learning rate need not be shared among them.
        keeps_gradients: whether every gradient is applied unchanged.
    """

    remembers: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    keeps_gradients: ClassVar[bool] = False

    def factor(self, staleness: int) -> float:
        """Return the weight of a gradient of this staleness, relative to that of a fresh one."""
        return 1.0

    def merger(self) -> Merger:
        """Return a new server's state."""
        return Merger()
