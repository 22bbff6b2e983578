"""How long the k-th quickest of n workers takes: expected order statistics of step times.

David, Nagaraja, "Order Statistics", 3rd edition 2003.

    P(X_(k:n) <= t) = sum_{i=k..n} C(n,i) F(t)^i (1-F(t))^(n-i)        E[max] = ∫ (1 - F(t)^n) dt  for t >= 0

A lock-step worker waits for the slowest of n (k = n, the default); with backup workers for the k-th of n. All times are
in seconds, k counts from 1, the quickest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, erfc, exp, log, sqrt

_REACH = 37.0
"""Standard deviations beyond which a normal tail is no double any more."""
_NODES_PER_DEVIATION = 64


def harmonic(number: int) -> float:
    """Gives `1 + 1/2 + … + 1/number`."""
    return sum(1 / k for k in range(number, 0, -1))


def exponential_s(mean_s: float, count: int, kth: int | None = None) -> float:
    """Of exponential times: `μ (H_n - H_(n-k))`."""
    return mean_s * (harmonic(count) - harmonic(count - _checked(count, kth)))


def shifted_exponential_s(shift_s: float, mean_s: float, count: int, kth: int | None = None) -> float:
    """Of a constant and an exponential time, added."""
    return shift_s + exponential_s(mean_s, count, kth)


def normal_s(mean_s: float, deviation_s: float, count: int, kth: int | None = None) -> float:
    """Of normal times, by quadrature. Times below 0 count as they are."""
    return mean_s + deviation_s * normal_scores(lambda score: score, count, kth)


def log_normal_s(median_s: float, sigma: float, count: int, kth: int | None = None) -> float:
    """Of log-normal times, by quadrature; `sigma` is the standard deviation of the logarithm."""
    return median_s * normal_scores(lambda score: exp(sigma * score), count, kth)


def empirical_s(times_s: Sequence[float], count: int, kth: int | None = None) -> float:
    """Of times drawn with replacement from a list: exact."""
    k, ordered = _checked(count, kth), sorted(times_s)
    below, mean = 0.0, 0.0
    for position, time_s in enumerate(ordered, 1):
        share = position / len(ordered)
        upto = sum(comb(count, i) * share**i * (1 - share) ** (count - i) for i in range(k, count + 1))
        mean += time_s * (upto - below)
        below = upto
    return mean


def normal_scores(value: Callable[[float], float], count: int, kth: int | None = None) -> float:
    """Gives the mean of `value(z)`, z being the k-th smallest of n standard normal numbers.

    The trapezoidal rule, which for such bell-shaped integrands converges faster than any power of its step. The density
    is taken in logarithms and divided by its own sum, so that its factor `n! / ((k-1)! (n-k)!)` never appears.
    """
    k = _checked(count, kth)
    steps = range(-int(_REACH * _NODES_PER_DEVIATION), int(_REACH * _NODES_PER_DEVIATION) + 1)
    scores = [step / _NODES_PER_DEVIATION for step in steps]
    logs = [(k - 1) * _log_below(z) + (count - k) * _log_below(-z) - z * z / 2 for z in scores]
    top = max(logs)
    weights = [exp(each - top) for each in logs]
    return sum(w * value(z) for w, z in zip(weights, scores, strict=True) if w) / sum(weights)


def best_split(count: int, kth_s: Callable[[int], float]) -> int:
    """Gives the k with the largest `k / kth_s(k)`: the most gradients a second, if a step ends with its k-th."""
    return max(range(1, count + 1), key=lambda k: k / kth_s(k))


def _log_below(score: float) -> float:
    """Gives log Φ(score), for scores within reach."""
    return log(erfc(-score / sqrt(2)) / 2)


def _checked(count: int, kth: int | None) -> int:
    k = count if kth is None else kth
    assert 1 <= k <= count, f"of {count} there is no {k}-th"
    return k
