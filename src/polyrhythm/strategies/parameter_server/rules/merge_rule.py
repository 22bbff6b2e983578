"""Merge rules: what a server makes of a gradient that was computed from older parameters than it holds."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from polyrhythm.specs import Config

MERGE_RULES = "polyrhythm.strategies.parameter_server.merge"


class Merger:
    """One server's state of a merge rule. Pushers are numbered from 0."""

    def factor(self, staleness: int) -> float:
        """Gives what a gradient of this staleness counts for; 1: as much as a fresh one."""
        return 1.0

    def correct(self, pusher: int, gradient: Tensor, seen: Tensor | None, values: Tensor) -> Tensor:
        """Gives the gradient as it is to be applied.

        Args:
            pusher: whose it is.
            gradient: `(n,)`, not changed.
            seen: `(n,)`, the parameters that the pusher was answered with, where the rule `remembers` them.
            values: `(n,)`, the parameters now, not changed.
        """
        return gradient

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives what a resumed merger needs; what pushers have seen is not asked for, since all pull anew."""
        return {}, {}

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `state` returned."""


class MergeRule(Config):
    """A merge rule's configuration, and the maker of its mergers.

    Attributes:
        remembers: whether it needs the parameters that each pusher was answered with.
        divides: whether stale gradients count for less, so that the learning rate need not be shared among them.
        keeps_gradients: whether every gradient is applied as it came.
    """

    remembers: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    keeps_gradients: ClassVar[bool] = False

    def merger(self) -> Merger:
        """Makes one server's merger."""
        raise NotImplementedError
