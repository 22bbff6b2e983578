"""What is made of the mean of all models at the end of a round."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from polyrhythm.strategies.state import State


class Outer(Protocol):
    """A rule from the point where a round began, and the mean of all models at its end, to where the next begins.

    Every worker applies it to the same numbers, so all get the same bits without another message.
    """

    def start(self, vector: Tensor) -> None:
        """Training starts at `vector`, `(size,)`, which is not kept."""

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """A round is over.

        Args:
            vector: `(size,)`, the mean of all models; in place, the point from which all begin the next round.
            learning_rate: of the round's last step.
        """

    def model(self) -> Tensor | None:
        """Gives the run's model, `(size,)`, between two rounds, where it is not the point from which workers begin."""

    def state(self) -> State:
        """Gives all that a resumed rule needs."""

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; then `start` is not called."""
