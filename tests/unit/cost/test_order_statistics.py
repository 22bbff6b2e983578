"""Order statistics against known figures, closed forms, and draws."""

from __future__ import annotations

from fractions import Fraction
from math import comb, erfc, exp, inf, log, pi, sqrt
from random import Random
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy.special import log_ndtr, logsumexp

from polyrhythm.cost.order_statistics import (
    best_split,
    empirical_s,
    exponential_s,
    harmonic,
    log_normal_s,
    normal_s,
    normal_scores,
    shifted_exponential_s,
)


@pytest.mark.parametrize(("count", "expected"), [(8, 2.718), (64, 4.744), (256, 6.124)])
def test_the_slowest_of_exponential_workers(count: int, expected: float) -> None:
    assert harmonic(count) == pytest.approx(expected, abs=5e-4)
    assert exponential_s(2.0, count) == pytest.approx(2 * harmonic(count), rel=1e-14)
    assert shifted_exponential_s(5.0, 2.0, count) == pytest.approx(5 + 2 * harmonic(count), rel=1e-14)


def test_backup_workers_cut_the_tail() -> None:
    assert exponential_s(1.0, 100, 96) == pytest.approx(3.104, abs=5e-4)
    assert exponential_s(1.0, 96) == pytest.approx(5.147, abs=5e-4)


@pytest.mark.parametrize(
    ("sigma", "expected"),
    [(0.1, (1.149, 1.259, 1.321)), (0.2, (1.313, 1.573, 1.731)), (0.5, (1.888, 2.926, 3.701))],
)
def test_the_slowest_of_log_normal_workers(sigma: float, expected: tuple[float, ...]) -> None:
    mean = exp(sigma**2 / 2)
    found = [log_normal_s(1.0, sigma, count) / mean for count in (8, 64, 256)]
    assert found == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(("sigma", "first", "all_of_them"), [(0.2, 1.375, 1.625), (0.5, 2.064, 3.168)])
def test_the_first_96_of_100_log_normal_workers(sigma: float, first: float, all_of_them: float) -> None:
    mean = exp(sigma**2 / 2)
    assert log_normal_s(1.0, sigma, 100, 96) / mean == pytest.approx(first, abs=6e-4)
    assert log_normal_s(1.0, sigma, 100) / mean == pytest.approx(all_of_them, abs=6e-4)


def test_normal_maxima_that_have_closed_forms() -> None:
    assert normal_s(0, 1, 1) == pytest.approx(0, abs=1e-14)
    assert normal_s(0, 1, 2) == pytest.approx(1 / sqrt(pi), rel=1e-13)
    assert normal_s(0, 1, 3) == pytest.approx(1.5 / sqrt(pi), rel=1e-13)
    assert normal_s(10, 2, 3, 1) == pytest.approx(10 - 3 / sqrt(pi), rel=1e-13)
    assert normal_s(10, 2, 3, 2) == pytest.approx(10, rel=1e-13)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 4.0])
def test_one_log_normal_worker_takes_the_mean(sigma: float) -> None:
    assert log_normal_s(0.3, sigma, 1) == pytest.approx(0.3 * exp(sigma**2 / 2), rel=1e-12)


@pytest.mark.parametrize(
    ("count", "kth"), [(1, 1), (7, 3), (100, 96), (1000, 1), (1000, 1000), (100_000, 100_000)]
)
def test_the_quadrature_agrees_with_the_exponentials_closed_form(count: int, kth: int) -> None:
    def quantile(score: float) -> float:
        return -log(erfc(score / sqrt(2)) / 2)  # exponential times, by normal scores

    assert normal_scores(quantile, count, kth) == pytest.approx(exponential_s(1.0, count, kth), rel=1e-11)


def test_uniform_times_from_a_list_have_beta_means() -> None:
    steps = 20_000
    times = [(position + 0.5) / steps for position in range(steps)]
    for count, kth in ((1, 1), (5, 2), (5, 5)):
        assert empirical_s(times, count, kth) == pytest.approx(kth / (count + 1), rel=1e-4)


def test_two_times_by_hand() -> None:
    # Of three coins the largest is 1 only if all are: 1/8; the middle one if two or three are: 1/2.
    assert empirical_s([3.0, 1.0], 3) == pytest.approx(1 / 8 + 3 * 7 / 8)
    assert empirical_s([3.0, 1.0], 3, 2) == pytest.approx(2.0)


def test_draws_agree() -> None:
    draw = Random(0)
    tops = [sorted(draw.lognormvariate(0, 0.5) for _ in range(16))[11] for _ in range(4000)]
    assert fmean(tops) == pytest.approx(log_normal_s(1.0, 0.5, 16, 12), abs=4 * stdev(tops) / sqrt(4000))


def test_the_best_split_waits_for_nearly_all_or_for_one() -> None:
    assert best_split(100, lambda k: 1.0) == 100  # nobody is slow
    assert (
        best_split(100, lambda k: exponential_s(1.0, 100, k)) == 1
    )  # time that has passed counts for nothing
    split = best_split(100, lambda k: shifted_exponential_s(5.0, 1.0, 100, k))
    rates = [k / shifted_exponential_s(5.0, 1.0, 100, k) for k in range(1, 101)]
    assert rates[split - 1] == max(rates)
    assert 80 < split < 100


def test_the_slowest_of_a_million() -> None:
    assert normal_s(0, 1, 1_000_000) == pytest.approx(4.8628975, rel=1e-7)  # by adaptive quadrature


@pytest.mark.parametrize(
    ("count", "kth", "sigma", "low", "high"),
    [
        (10, 10, 20.0, -10, 45),  # the integrand's peak is far beyond that of the scores
        (1, 1, 36.0, -12, 50),
        (10, 1, 5.0, -20, 20),
        (10**6, 700_000, 0.5, 0.4, 0.7),  # a density of a thousandth of a deviation
        (10**6, 600_000, 3.0, 0.2, 0.4),
        (10**15, 10**15, 0.5, 5, 12),  # where 1 - 1e-16 is 1
        (10**300, 10**300, 1.0, 35, 40),
    ],
)
def test_extreme_inputs_agree_with_brute_force(
    count: int, kth: int, sigma: float, low: float, high: float
) -> None:
    """Many nodes over all that counts, in logarithms, whose last bits are noise."""
    z = np.linspace(low, high, 400_001)
    density = (kth - 1) * log_ndtr(z) + float(count - kth) * log_ndtr(-z) - z * z / 2
    mean = logsumexp(density + sigma * z) - logsumexp(density)
    assert log(log_normal_s(1.0, sigma, count, kth)) == pytest.approx(mean, rel=1e-9)
    if sigma <= 3:  # else the range is that of the tilted density
        weights = np.exp(density - density.max())
        score = (weights * z).sum() / weights.sum()
        assert normal_s(0, 1, count, kth) == pytest.approx(score, rel=1e-9)


def test_one_extreme_log_normal_time_has_its_closed_form_or_is_beyond_doubles() -> None:
    assert log_normal_s(1.0, 37.0, 1) == pytest.approx(exp(37.0**2 / 2), rel=1e-11)
    assert log_normal_s(1.0, 60.0, 1) == inf
    assert log_normal_s(1.0, 1e4, 1000, 1) == inf


@pytest.mark.parametrize(("count", "kth"), [(200_000, 200_000), (300_000, 250_000), (300_000, 7)])
def test_many_exponential_workers_have_the_plain_sum(count: int, kth: int) -> None:
    plain = float(np.sum(1 / np.arange(count - kth + 1, count + 1, dtype=np.longdouble)))
    assert exponential_s(1.0, count, kth) == pytest.approx(plain, rel=1e-13)


@pytest.mark.parametrize(("count", "kth"), [(1500, 1000), (1500, 1), (1500, 1500), (1500, 700)])
def test_times_from_a_list_have_exact_means_for_many_workers(count: int, kth: int) -> None:
    """Against whole numbers: the median of 1500 throws has binomials that are no doubles."""
    times = [1, 2, 4]
    upto = [
        sum(
            Fraction(comb(count, i) * place**i * (3 - place) ** (count - i), 3**count)
            for i in range(kth, count + 1)
        )
        for place in (1, 2, 3)
    ]
    mean = sum(
        time * (now - before) for time, now, before in zip(times, upto, [Fraction(0), *upto], strict=False)
    )
    assert empirical_s([4.0, 1.0, 2.0], count, kth) == pytest.approx(float(mean), rel=1e-12)
