"""Costs fitted to measured seconds: against formulas whose costs are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

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
