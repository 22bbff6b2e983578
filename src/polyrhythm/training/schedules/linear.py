"""A straight line from 1 at the end of the warm-up to `final` at the end of the run.

factor = 1 - (1 - final) x,   x = steps since warm-up / steps after warm-up
"""

from __future__ import annotations

from polyrhythm.training.quantities import Fraction
from polyrhythm.training.schedule import Schedule, elapsed


class Linear(Schedule):
    """Keys of the linear schedule.

    Attributes:
        final: the factor at the end of the run.
    """

    final: Fraction = 0.0

    def decay(self, step: float, warmup_steps: int, total_steps: float) -> float:
        return 1 - (1 - self.final) * elapsed(step, warmup_steps, total_steps)
