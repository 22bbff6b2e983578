"""Expected time of the k-th fastest of n workers: order statistics of step times.

David, Nagaraja, "Order Statistics", 3rd edition 2003.

    P(X_(k:n) <= t) = sum_{i=k..n} C(n,i) F(t)^i (1-F(t))^(n-i)        E[max] = ∫ (1 - F(t)^n) dt  for t >= 0

A lockstep worker waits for the slowest of n (k = n, the default); with backup workers for the k-th of n. All times are
in seconds, k counts from 1, the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import erfc, exp, inf, log, log1p, pi, sqrt

_EULER = 0.5772156649015329
_MOST_TERMS = 100_000
"""Beyond, sums of reciprocals use their asymptotic series, which is exact to the last bits from there on."""
_NODES_PER_DEVIATION = 16
_NEGLIGIBLE = 50.0
"""Terms smaller than e to minus this do not change a double."""
_TAIL = -36.0
"""Score below which the normal tail is computed by its asymptotic series, as it will soon underflow a double."""


def harmonic(number: int) -> float:
    """Return `1 + 1/2 + … + 1/number`."""
    if number > _MOST_TERMS:
        return log(number) + _EULER + 1 / (2 * number) - 1 / (12 * number**2)
    return sum(1 / k for k in range(number, 0, -1))


def exponential_s(mean_s: float, count: int, kth: int | None = None) -> float:
    """For exponential times: `μ (H_n - H_(n-k))`."""
    k = _checked(count, kth)
    if k <= _MOST_TERMS:  # so that no difference loses the last bits
        return mean_s * sum(1 / number for number in range(count, count - k, -1))
    return mean_s * (harmonic(count) - harmonic(count - k))


def shifted_exponential_s(shift_s: float, mean_s: float, count: int, kth: int | None = None) -> float:
    """For the sum of a constant and an exponential time."""
    return shift_s + exponential_s(mean_s, count, kth)


def normal_s(mean_s: float, deviation_s: float, count: int, kth: int | None = None) -> float:
    """For normal times, by quadrature. Negative times are not cut off."""
    return mean_s + deviation_s * normal_scores(lambda score: score, count, kth)


def log_normal_s(median_s: float, sigma: float, count: int, kth: int | None = None) -> float:
    """For log-normal times, by quadrature; `sigma` is the logarithm's standard deviation. `inf` on overflow."""
    times, plain = _Scores(count, kth, sigma), _Scores(count, kth)
    logarithm = times.log_sum() - plain.log_sum()
    try:
        return median_s * exp(logarithm)
    except OverflowError:
        return inf


def empirical_s(times_s: Sequence[float], count: int, kth: int | None = None) -> float:
    """For times drawn with replacement from a list: exact."""
    k, ordered = _checked(count, kth), sorted(times_s)
    below, mean = 0.0, 0.0
    for position, time_s in enumerate(ordered, 1):
        upto = _at_least(k, count, position, len(ordered) - position)
        mean += time_s * (upto - below)
        below = upto
    return mean


def normal_scores(value: Callable[[float], float], count: int, kth: int | None = None) -> float:
    """Return the mean of `value(z)`, where z is the k-th smallest of n standard normal numbers.

    The trapezoidal rule, which for such bell-shaped integrands converges faster than any power of its step. The density
    is computed in logarithms and divided by its own sum, so that its factor `n! / ((k-1)! (n-k)!)` never appears.
    """
    scores = _Scores(count, kth)
    weights = [exp(each - scores.top) for each in scores.logs]
    return sum(w * value(z) for w, z in zip(weights, scores.at, strict=True)) / sum(weights)


def best_split(count: int, kth_s: Callable[[int], float]) -> int:
    """Return the k with the largest `k / kth_s(k)`: the most gradients per second, if a step ends with its k-th."""
    return max(range(1, count + 1), key=lambda k: k / kth_s(k))


class _Scores:
    """Quadrature nodes for the density of the k-th of n normal scores, times `exp(tilt * z)`, and its logarithms there.

    The logarithm is concave, with a curvature of at least 1: its peak is found by bisection, and all that counts is
    near.
    """

    def __init__(self, count: int, kth: int | None, tilt: float = 0.0) -> None:
        self._below = _checked(count, kth) - 1
        self._above = count - self._below - 1
        self._tilt = tilt
        peak = self._peak()
        self.top = self._log(peak)
        self._step = 1 / (_NODES_PER_DEVIATION * sqrt(self._curvature(peak)))
        self.at = [*reversed(self._side(peak, -1)), peak, *self._side(peak, 1)]
        self.logs = [self._log(score) for score in self.at]

    def log_sum(self) -> float:
        """Return the logarithm of the integral, without the factor that depends only on count and k."""
        return self.top + log(sum(exp(each - self.top) for each in self.logs) * self._step)

    def _log(self, score: float) -> float:
        density = self._below * _log_below(score) + self._above * _log_below(-score) - score * score / 2
        return density + self._tilt * score

    def _slope(self, score: float) -> float:
        return self._below * _hazard(score) - self._above * _hazard(-score) - score + self._tilt

    def _curvature(self, score: float) -> float:
        below, above = _hazard(score), _hazard(-score)
        return 1 + self._below * below * (below + score) + self._above * above * (above - score)

    def _peak(self) -> float:
        low, high = -40.0 - abs(self._tilt), 40.0 + abs(self._tilt)
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if self._slope(middle) > 0 else (low, middle)
        return middle

    def _side(self, peak: float, direction: int) -> list[float]:
        found: list[float] = []
        while not found or self._log(found[-1]) > self.top - _NEGLIGIBLE:
            found.append(peak + direction * self._step * (len(found) + 1))
        return found


def _at_least(least: int, count: int, in_favor: int, against: int) -> float:
    """Return the probability of at least `least` successes out of `count` at odds of `in_favor : against`.

    Binomial terms are divided by the largest of them and by their sum, so that none overflows a double.
    """
    if not against:
        return 1.0
    mode = min(count, (count + 1) * in_favor // (in_favor + against))
    found, sums = 1.0, [0.0, 0.0]
    for successes in range(mode, count + 1):
        sums[successes >= least] += found
        found *= (count - successes) * in_favor / ((successes + 1) * against)
        if found < exp(-_NEGLIGIBLE):
            break
    found = 1.0
    for successes in range(mode, 0, -1):
        found *= successes * against / ((count - successes + 1) * in_favor)
        sums[successes - 1 >= least] += found
        if found < exp(-_NEGLIGIBLE):
            break
    return sums[1] / sum(sums)


def _hazard(score: float) -> float:
    """Return φ(score) / Φ(score), the slope of log Φ."""
    return exp(-score * score / 2 - log(2 * pi) / 2 - _log_below(score))


def _log_below(score: float) -> float:
    """Return log Φ(score)."""
    if score > 0:
        return log1p(-erfc(score / sqrt(2)) / 2)
    if score > _TAIL:
        return log(erfc(-score / sqrt(2)) / 2)
    square = score * score
    series = 1 - (1 - (3 - (15 - 105 / square) / square) / square) / square
    return -square / 2 - log(-score * sqrt(2 * pi)) + log(series)


def _checked(count: int, kth: int | None) -> int:
    k = count if kth is None else kth
    assert 1 <= k <= count, f"of {count} there is no {k}-th"
    return k
