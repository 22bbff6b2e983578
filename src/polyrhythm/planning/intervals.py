"""Intervals of predictions, all of one level.

    mean ± t(0.9, degrees of freedom) s        80 %: 10 % are below, 10 % above

Student, "The probable error of a mean", Biometrika 1908. Quantiles of t by the expansion of Cornish and Fisher
(Abramowitz and Stegun 26.7.5), and in closed form for one and two degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.8
"""Share of predictions that an interval is to hold, wherever one is reported."""
_TAIL = (1 + LEVEL) / 2
_NORMAL = 1.2815515655446004


def t_quantile(freedom: int) -> float:
    """Return by how many standard deviations an interval of `LEVEL` reaches to either side.

    Args:
        freedom: degrees of freedom of the deviation; 0: it is known.
    """
    if freedom <= 0:
        return _NORMAL
    if freedom == 1:
        return math.tan(math.pi * (_TAIL - 0.5))
    if freedom == 2:
        return (2 * _TAIL - 1) / math.sqrt(2 * _TAIL * (1 - _TAIL))
    z, n = _NORMAL, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


@dataclass(frozen=True)
class Noise:
    """Spread of the times to the target between seeds.

    Attributes:
        deviation: deviation of their logarithms; not a number where no candidate has two seeds.
        freedom: degrees of freedom of that.
    """

    deviation: float
    freedom: int

    def interval(self, middle: float, seeds: int) -> tuple[float, float, float]:
        """Return a mean over seeds, with the interval of a further seed."""
        if self.freedom < 1 or not math.isfinite(middle):
            return middle, math.nan, math.nan
        reach = math.exp(t_quantile(self.freedom) * self.deviation * math.sqrt(1 + 1 / seeds))
        return middle, middle / reach, middle * reach

    def alike(self, first: float, second: float, seeds: tuple[int, int]) -> bool:
        """Whether two means differ by no more than seeds do."""
        if self.freedom < 1:
            return first == second
        spread = self.deviation * math.sqrt(sum(1 / count for count in seeds))
        return abs(math.log(first / second)) < t_quantile(self.freedom) * spread


def noise_of(times: Sequence[Sequence[float]]) -> Noise:
    """Return the noise of seeds, from the times of every candidate's seeds."""
    squares, freedom = 0.0, 0
    for each in times:
        if len(each) > 1:
            logs = [math.log(time) for time in each]
            squares += (len(logs) - 1) * statistics.variance(logs)
            freedom += len(logs) - 1
    return Noise(math.sqrt(squares / freedom) if freedom else math.nan, freedom)
