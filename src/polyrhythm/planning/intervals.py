"""Intervals of predictions, all of one level.

    mean ± t(0.9, degrees of freedom) s        80 %: 10 % are below, 10 % above

Candidates are tried with the same seeds, and a seed that is lucky for one (the same initial weights and order of
images) may be lucky for all. S, E: mean squares of seeds and of the rest, of C candidates and k seeds (two-way analysis
of variance). The interval of a further seed has the degrees of freedom of Satterthwaite's sum of both parts;
differences between candidates, in which such luck cancels, have those of all candidates.

    (S + (C-1) E)² / (S² / (k-1) + (C-1) E² / (k-1))         k - 1 where seeds decide, C (k-1) where they do not

Satterthwaite, "An approximate distribution of estimates of variance components", Biometrics Bulletin 1946.

Times to a target are known by tests alone, so they are rounded up to the next one. Seeds that agree show no more than
that: rounding to multiples of d has the deviation d / sqrt(12), and no smaller one is assumed.

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


def t_quantile(freedom: float) -> float:
    """Return by how many standard deviations an interval of `LEVEL` reaches to either side.

    Args:
        freedom: degrees of freedom of the deviation, up to 2 as whole numbers; 0: it is known.
    """
    if freedom <= 0:
        return _NORMAL
    if freedom <= 1:
        return math.tan(math.pi * (_TAIL - 0.5))
    if freedom <= 2:
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
        freedom: degrees of freedom of that, for differences between candidates.
        seeds: degrees of freedom for the interval of a further seed; 0: the same.
    """

    deviation: float
    freedom: int
    seeds: float = 0.0

    def interval(self, middle: float, seeds: int) -> tuple[float, float, float]:
        """Return a mean over seeds, with the interval of a further seed."""
        if self.freedom < 1 or not math.isfinite(middle):
            return middle, math.nan, math.nan
        reach = math.exp(t_quantile(self.seeds or self.freedom) * self.deviation * math.sqrt(1 + 1 / seeds))
        return middle, middle / reach, middle * reach

    def alike(self, first: float, second: float, seeds: tuple[int, int]) -> bool:
        """Whether two means differ by no more than seeds do."""
        if self.freedom < 1:
            return first == second
        spread = self.deviation * math.sqrt(sum(1 / count for count in seeds))
        return abs(math.log(first / second)) < t_quantile(self.freedom) * spread


def noise_of(times: Sequence[Sequence[float]], rounding: Sequence[float] = ()) -> Noise:
    """Return the noise of seeds.

    Args:
        times: times of every candidate's seeds, which are the same for all, in the same order.
        rounding: rounding errors of the times, as logarithms of their ratios to the previous test; empty: exact times.
    """
    squares, freedom = 0.0, 0
    logs = [[math.log(time) for time in each] for each in times if len(each) > 1]
    for each in logs:
        squares += (len(each) - 1) * statistics.variance(each)
        freedom += len(each) - 1
    if not freedom:
        return Noise(math.nan, 0, 0)
    least = statistics.fmean(each**2 for each in rounding) / 12 if rounding else 0.0
    most = max(map(len, logs))
    hidden = least > squares / freedom  # by rounding, which is that of the same seeds
    seeds = most - 1 if hidden else _freedom_of_seeds([each for each in logs if len(each) == most])
    return Noise(math.sqrt(max(squares / freedom, least)), freedom, seeds)


def _freedom_of_seeds(logs: Sequence[Sequence[float]]) -> float:
    """Return the degrees of freedom of a deviation with a part that all candidates share; see above.

    Args:
        logs: logarithms of the times of the same seeds of every candidate.
    """
    count, seeds = len(logs), len(logs[0])
    apart = [[each - statistics.fmean(times) for each in times] for times in logs]
    shared = [statistics.fmean(column) for column in zip(*apart, strict=True)]
    own = sum((each - mean) ** 2 for times in apart for each, mean in zip(times, shared, strict=True))
    of_seeds = count * sum(mean**2 for mean in shared) / (seeds - 1)
    of_rest = own / (seeds - 1)  # (count - 1) times the mean square
    if not of_seeds + of_rest:
        return seeds - 1
    parts = of_seeds**2 + (of_rest**2 / (count - 1) if count > 1 else 0.0)
    return (seeds - 1) * (of_seeds + of_rest) ** 2 / parts
