"""Delay: messages are late, and what follows them on the same link waits behind them."""

from __future__ import annotations

from random import Random

from polyrhythm.simulation.injection.fault import MessageFault, Passage
from polyrhythm.training.quantities import Positive


class Delay(MessageFault):
    """Chosen messages are late.

    Attributes:
        seconds: seconds by which they are.
    """

    seconds: Positive

    def holds_up_s(self, step_s: float) -> float:
        """Return the delay of some messages in a row."""
        return 10 * self.seconds

    def happen(self, passage: Passage, random: Random) -> None:
        passage.delay_s += self.seconds
