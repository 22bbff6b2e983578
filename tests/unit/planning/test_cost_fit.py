"""Costs fitted to measured seconds: against formulas whose costs are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from polyrhythm.planning.cost_fit import Numbers, fit_costs
from polyrhythm.planning.intervals import t_quantile

WORKERS = (1, 2, 4, 8)
EVERYTHING = np.ones((4, 2), dtype=bool)


def serial(compute_s: float, send_s: float) -> Callable[[int, Numbers], float]:
    """Return seconds of a step that computes, and then sends through one server between all workers."""
    return lambda row, costs: compute_s * float(costs[0]) + WORKERS[row] * send_s * float(costs[1])


def overlapped(compute_s: float, send_s: float) -> Callable[[int, Numbers], float]:
    """Return seconds of a step that computes while it sends."""
    return lambda row, costs: max(compute_s * float(costs[0]), WORKERS[row] * send_s * float(costs[1]))


@pytest.mark.parametrize("model", [serial, overlapped])
def test_two_costs_come_back_from_a_guess_far_away(
    model: Callable[[float, float], Callable[[int, Numbers], float]],
) -> None:
    truth = model(0.8, 0.4)
    measured = [truth(row, np.ones(2)) for row in range(4)]
    found = fit_costs(model(0.1, 0.001), measured, EVERYTHING)
    assert found.costs == pytest.approx([8, 400], rel=2e-3)
    assert found.seconds == pytest.approx(measured, rel=2e-3)
    assert found.determined.all()


def test_few_simulations_are_needed() -> None:
    calls = []

    def counted(row: int, costs: Numbers) -> float:
        calls.append(row)
        return serial(0.1, 0.01)(row, costs)

    fit_costs(counted, [serial(0.8, 0.4)(row, np.ones(2)) for row in range(4)], EVERYTHING)
    assert len(calls) <= 40


def test_of_shorter_simulations_only_ratios_count() -> None:
    """They take 50 times as long, and most simulations are short ones."""
    simulate, whole = serial(0.1, 0.001), list[int]()

    def counted(row: int, costs: Numbers) -> float:
        whole.append(row)
        return simulate(row, costs)

    def shorter(asks: Sequence[tuple[int, Numbers]]) -> list[float]:
        return [50 * simulate(row, costs) for row, costs in asks]

    measured = [serial(0.8, 0.4)(row, np.ones(2)) for row in range(4)]
    found = fit_costs(counted, measured, EVERYTHING, compare_all=shorter)
    assert found.costs == pytest.approx([8, 400], rel=2e-3)
    assert found.seconds == pytest.approx(measured, rel=2e-3)
    assert len(whole) <= 20


def test_no_set_up_is_simulated_twice_at_the_same_costs() -> None:
    """The last measurement repeats the one before; the first depends on its first cost alone."""
    truth = serial(0.8, 0.4)
    asked: list[tuple[int, tuple[float, ...]]] = []
    largest = 0

    def all_of(asks: Sequence[tuple[int, Numbers]]) -> list[float]:
        nonlocal largest
        largest = max(largest, len(asks))
        asked.extend((row, tuple(costs[:1] if row == 0 else costs)) for row, costs in asks)
        return [serial(0.1, 0.01 if row else 0.0)(row, costs) for row, costs in asks]

    rows = (0, 1, 2, 3, 3)
    measured = [0.8, *(truth(row, np.ones(2)) for row in rows[1:])]
    matters = np.asarray([[True, False], *[[True, True]] * 4])
    found = fit_costs(serial(0.1, 0.01), measured, matters, simulate_all=all_of, same_as=rows)
    assert found.costs == pytest.approx([8, 40], rel=2e-3)
    assert len(asked) == len(set(asked))
    assert 4 not in {row for row, _ in asked}
    assert largest > 4  # those of a round at a time


def test_two_measurements_are_met_exactly_although_seconds_jump() -> None:
    """Arrivals change places as costs change: seconds are off by up to 1 %, differently at every point."""

    def jumping(row: int, costs: Numbers) -> float:
        return serial(1.0, 0.2)(row, costs) * (
            1 + 0.01 * random.Random(str(np.round(costs, 3))).uniform(-1, 1)
        )

    measured = [serial(1.3, 0.5)(row, np.ones(2)) for row in (0, 3)]
    found = fit_costs(lambda row, costs: jumping((0, 3)[row], costs), measured, EVERYTHING[:2])
    assert found.seconds == pytest.approx(measured, rel=2e-3)


def test_intervals_hold_the_truth_four_times_of_five() -> None:
    """Seconds with errors of 3 %; an interval of 80 % misses the truth every fifth time."""
    generator, hits, tries = random.Random(1), 0, 100
    for _ in range(tries):
        measured = [
            serial(0.8, 0.4)(row, np.ones(2)) * math.exp(generator.gauss(0, 0.03)) for row in range(4)
        ]
        found = fit_costs(serial(1.0, 0.5), measured, EVERYTHING)
        hits += bool(found.low[0] < 0.8 < found.high[0])
    assert 0.65 * tries <= hits <= 0.92 * tries


def test_a_cost_that_no_measurement_depends_on_stays_without_limits() -> None:
    deaf = EVERYTHING.copy()
    deaf[:, 1] = False
    found = fit_costs(serial(1.0, 0.0), [2.0, 2.0, 2.0, 2.0], deaf)
    assert found.costs == pytest.approx([2, 1])
    assert (found.low[1], found.high[1]) == (0, math.inf)
    assert found.determined.tolist() == [True, False]


def test_a_cost_that_is_hidden_behind_another_has_an_upper_limit_alone() -> None:
    """Sending is hidden behind computing for all of them: it takes at most a quarter of what 8 workers leave it."""
    measured = [overlapped(0.8, 0.01)(row, np.ones(2)) for row in range(4)]
    found = fit_costs(overlapped(0.1, 0.001), measured, EVERYTHING)
    assert found.low[1] == 0
    assert found.high[1] == pytest.approx(0.8 / 8 / 0.001, rel=0.05)
    assert found.costs[1] == 1  # the guess, which is as good as any below the limit


def test_costs_that_only_show_as_a_sum_are_not_determined() -> None:
    found = fit_costs(lambda row, costs: float(costs[0] + costs[1]), [3.0, 3.0, 3.0], EVERYTHING[:3])
    assert found.costs.sum() == pytest.approx(3, rel=1e-2)
    assert not found.determined.any()


def test_a_measurement_out_of_line_is_predicted_by_the_others() -> None:
    measured = [serial(0.8, 0.4)(row, np.ones(2)) for row in range(4)]
    measured[2] *= 2
    found = fit_costs(serial(1.0, 1.0), measured, EVERYTHING)
    assert found.left_out[2] == pytest.approx(measured[2] / 2, rel=0.01)


def test_quantiles_of_t_are_those_of_the_tables() -> None:
    tables = {1: 3.0777, 2: 1.8856, 3: 1.6377, 5: 1.4759, 10: 1.3722, 30: 1.3104, 0: 1.2816}
    for freedom, value in tables.items():
        assert t_quantile(freedom) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize(
    ("worker", "network", "shown", "costs"),
    [
        (1.0, 6.5e-4, 0.0, (1.0, 2000.0)),  # the network is much slower than the first guess
        (3.0, 1.0, 0.0, (1 / 3, 1.3)),  # a worker is faster, and then the network shows
        (3.0, 1.0, 1e-4, (1 / 3, 1.2999)),  # a little of the network shows always
    ],
)
def test_a_cost_that_overlaps_with_another_until_it_is_large_is_found(
    worker: float, network: float, shown: float, costs: tuple[float, float]
) -> None:
    """One worker takes 1 s a step; of four, each waits for the network."""
    measured = [1.0, 1.5]

    def simulate(row: int, costs: Numbers) -> float:
        step = worker * costs[0]
        return float(step if row == 0 else max(step, 0.2 * step + network * costs[1]) + shown * costs[1])

    fitted = fit_costs(simulate, measured, np.asarray([[True, False], [True, True]]))
    assert fitted.seconds == pytest.approx(measured, rel=5e-3)
    assert fitted.costs == pytest.approx(costs, rel=2e-2)
