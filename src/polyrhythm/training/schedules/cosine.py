"""Half a cosine wave, from 1 at the end of the warm-up to `final` at the end of the run.

Paper: I. Loshchilov, F. Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, arXiv
1608.03983.

    factor = final + (1 - final) (1 + cos(pi x)) / 2,   x = steps since warm-up / steps after warm-up

One period, no restarts; per step, where the paper has its formula per epoch.
"""

from __future__ import annotations

from math import cos, pi

from polyrhythm.training.quantities import Fraction
from polyrhythm.training.schedule import Schedule, elapsed


class Cosine(Schedule):
    """Keys of the cosine schedule.

    Attributes:
        final: the factor at the end of the run.
    """

    final: Fraction = 0.0

    def decay(self, step: float, warmup_steps: int, total_steps: float) -> float:
        wave = (1 + cos(pi * elapsed(step, warmup_steps, total_steps))) / 2
        return self.final + (1 - self.final) * wave
