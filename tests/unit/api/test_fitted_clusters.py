"""Fitting unknowns of a cluster to throughputs: against formulas whose unknowns are known."""

from __future__ import annotations

import numpy as np
import pytest

from polyrhythm.api.calibrate import Numbers, fit, value_of, with_values
from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import StepWork
from unit.simulation.clusters import cluster

WORKERS = np.asarray([1, 2, 4, 8])


def throughput(values: Numbers) -> Numbers:
    """Return N b / (c + N M / B): a server of bandwidth B between N workers that compute for c seconds."""
    compute_s, bandwidth = values
    found: Numbers = WORKERS * 64 / (compute_s + WORKERS * 1e8 / bandwidth)
    return found


def test_two_unknowns_come_back_from_a_guess_far_away() -> None:
    measured = throughput(np.asarray([0.8, 2.5e8]))
    found, predicted = fit(["compute", "bandwidth"], [0.1, 7e9], throughput, measured)
    assert [each.value for each in found] == pytest.approx([0.8, 2.5e8], rel=1e-3)
    assert predicted == pytest.approx(measured, rel=1e-3)
    assert all(each.told for each in found)


def test_intervals_grow_with_the_noise_of_measurements_and_hold_the_truth() -> None:
    measured = throughput(np.asarray([0.8, 2.5e8]))
    noise = np.asarray([1.02, 0.97, 1.03, 0.98])
    found, _ = fit(["compute", "bandwidth"], [1.0, 1e8], throughput, measured * noise)
    for each, truth in zip(found, (0.8, 2.5e8), strict=True):
        assert each.low < truth < each.high
        assert each.high / each.low > 1.05


def test_what_no_measurement_feels_is_left_and_said_to_be_unknown() -> None:
    def deaf(values: Numbers) -> Numbers:
        found: Numbers = np.full(3, 100.0) / values[0]
        return found

    compute, other = fit(["compute", "other"], [1.0, 5.0], deaf, [50.0, 50.0, 50.0])[0]
    assert compute.value == pytest.approx(2, rel=1e-3)
    assert compute.told
    assert (other.value, other.told) == (5.0, False)


def test_what_only_shows_as_a_product_is_not_told() -> None:
    def product(values: Numbers) -> Numbers:
        found: Numbers = np.asarray([1.0, 2.0, 4.0]) / (values[0] * values[1])
        return found

    found = fit(["one", "other"], [1.0, 1.0], product, [0.5, 1.0, 2.0])[0]
    assert found[0].value * found[1].value == pytest.approx(2, rel=1e-2)
    assert not any(each.told for each in found)


def test_values_are_put_where_the_file_has_them() -> None:
    before = cluster({}, step_time="log_normal(median=1, sigma=0.1)")
    made = with_values(
        before,
        {"step_time": 2.0, "spread": 0.3, "nic_bandwidth": 5.0, "nic_latency": 0.1, "server_bandwidth": 7.0},
    )
    assert made.step_factor == 2.0
    assert str(made.step_time) == "log_normal(median=1.0, sigma=0.3)"
    assert (made.nic.bandwidth_bytes_per_s, made.nic.latency_s) == (5.0, 0.1)
    assert made.server_bandwidth_bytes_per_s == 7.0
    assert value_of(made, "server_bandwidth") == 7.0
    with pytest.raises(RequestError, match="the spread of steps is fitted"):
        value_of(cluster({}), "spread")


def test_a_share_of_the_peak_falls_as_steps_grow_longer() -> None:
    paced = cluster({}, step_of=StepWork(peak_multiply_adds_per_s=1e12, share_of_peak=0.5))
    slower = with_values(paced, {"step_time": 1.25}).step_of
    assert slower is not None
    assert slower.share_of_peak == pytest.approx(0.4)
