"""Rounds as contributions: what watches gradients of steps watches what groups push of their rounds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyrhythm.strategies.invariant import Conditions, Delivered, Ended, Handled, Invariant, Stepped


def of_rounds(conditions: Conditions, steps: int) -> Conditions:
    """Gives conditions in which a round's movement stands for a gradient, and the round for its step.

    Args:
        conditions: of the run.
        steps: of a round; the last of a run may have fewer.
    """
    gradient, total = conditions.gradient, conditions.steps

    def moved(worker: int, number: int) -> Tensor:
        assert gradient is not None, "asked only where gradients are known"
        stop = (number + 1) * steps if total is None else min((number + 1) * steps, total)
        return torch.stack([gradient(worker, step) for step in range(number * steps, stop)]).sum(0)

    return replace(
        conditions,
        gradient=None if gradient is None else moved,
        steps=None if total is None else -(-total // steps),
    )


class InRounds(Invariant):
    """Lets another invariant take rounds for steps.

    Args:
        inner: the other invariant.
        steps: of a round.
    """

    def __init__(self, inner: Invariant, steps: int) -> None:
        self._inner = inner
        self._steps = steps

    def delivered(self, event: Delivered) -> None:
        """Passes it on."""
        self._inner.delivered(event)

    def handled(self, event: Handled) -> None:
        """Passes it on: servers hear of rounds only."""
        self._inner.handled(event)

    def stepped(self, event: Stepped) -> None:
        """Passes it on if a round is over."""
        if (event.step + 1) % self._steps == 0:
            self._inner.stepped(replace(event, step=event.step // self._steps))

    def ended(self, event: Ended) -> None:
        """Passes it on, in rounds."""
        self._inner.ended(replace(event, steps=-(-event.steps // self._steps)))
