from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.simulation.step_time import STEP_TIMES, StepTime, generator_for_rank
from polyrhythm.specs import build

TRIALS = 4000


def make(spec: str) -> StepTime:
    made = build("step time", spec, STEP_TIMES)
    assert isinstance(made, StepTime)
    return made


def harmonic(count: int) -> float:
    return float(sum(Fraction(1, number) for number in range(1, count + 1)))


def order_statistic(spec: str, count: int, place: int) -> list[float]:
    """Draws the `place`-th smallest of `count`, many times."""
    distribution, generator = make(spec), Random(1)
    return [sorted(distribution.draw(generator) for _ in range(count))[place - 1] for _ in range(TRIALS)]


def assert_mean(samples: list[float], expected: float) -> None:
    error = stdev(samples) / len(samples) ** 0.5
    assert abs(fmean(samples) - expected) < 4 * error
    assert error < 0.02 * expected  # tight enough to tell


@pytest.mark.parametrize(
    ("spec", "mean"),
    [
        ("normal(mean=0.5, deviation=0.1)", 0.5),
        ("log_normal(mean=0.5, sigma=0.4)", 0.5),
        ("log_normal(median=0.5, sigma=0.4)", 0.5 * 1.083287),  # exp(0.08)
        ("exponential(mean=0.5)", 0.5),
        ("shifted_exponential(shift=0.25, mean=0.5)", 0.75),
    ],
)
def test_the_mean_is_what_the_words_say(spec: str, mean: float) -> None:
    assert_mean(order_statistic(spec, 1, 1), mean)


@pytest.mark.parametrize("count", [2, 8, 64])
def test_the_slowest_of_exponential_workers_takes_a_harmonic_number_of_means(count: int) -> None:
    assert_mean(order_statistic("exponential(mean=2)", count, count), 2 * harmonic(count))


def test_the_shift_comes_on_top_of_that() -> None:
    assert_mean(order_statistic("shifted_exponential(shift=3, mean=2)", 8, 8), 3 + 2 * harmonic(8))


def test_those_who_do_not_wait_for_the_last_ones_gain() -> None:
    """96 of 100: 3.104 means."""
    samples = order_statistic("exponential(mean=1)", 100, 96)
    assert_mean(samples, harmonic(100) - harmonic(4))
    assert_mean(samples, 3.104)


@pytest.mark.parametrize(("count", "ratio"), [(8, 1.888), (64, 2.926)])
def test_the_slowest_of_log_normal_workers(count: int, ratio: float) -> None:
    assert_mean(order_statistic("log_normal(mean=1, sigma=0.5)", count, count), ratio)


def test_a_normal_time_is_never_negative() -> None:
    distribution, generator = make("normal(mean=0.3, deviation=0.1)"), Random(0)
    assert min(distribution.draw(generator) for _ in range(20_000)) > 0


def test_measured_times_are_drawn_as_often_as_they_were_measured(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    file.write_text("0.1\n0.1\n\n0.4\n")
    distribution, generator = make(f"empirical(file={str(file)!r})"), Random(0)
    drawn = [distribution.draw(generator) for _ in range(TRIALS)]
    assert set(drawn) == {0.1, 0.4}
    assert_mean(drawn, 0.2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("expnential(mean=1)", "unknown step time 'expnential': did you mean exponential"),
        ("constant(seconds=0)", "seconds should be greater than 0"),
        ("exponential(mean=-1)", "mean should be greater than 0"),
        ("normal(mean=1, deviation=0.5)", "use log_normal"),
        ("log_normal(sigma=1)", "give either its median or its mean"),
        ("log_normal(median=1, mean=1, sigma=1)", "give either its median or its mean"),
        ("empirical(file='no/file')", "cannot read no/file"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1\nfast\n", "line 2 of .* not a positive"),
        ("-1\n", "line 1"),
        ("nan", "line 1"),
        ("\n", "is empty"),
    ],
)
def test_a_file_of_other_things_than_times_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "times.txt"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        make(f"empirical(file={str(file)!r})")


def test_every_rank_has_a_stream_of_its_own_that_never_changes() -> None:
    first = [generator_for_rank(7, rank).random() for rank in range(50)]
    assert first == [generator_for_rank(7, rank).random() for rank in range(50)]
    assert all(one != other for one, other in pairwise(sorted(first)))
    assert generator_for_rank(8, 0).random() != first[0]
