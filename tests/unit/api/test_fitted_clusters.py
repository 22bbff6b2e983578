"""Values of a cluster file that `calibrate` fits."""

from __future__ import annotations

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import StepWork
from polyrhythm.simulation.fitted import value_of, with_values
from unit.simulation.clusters import cluster


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


def test_links_of_a_tree_are_fitted_with_those_inside() -> None:
    tree = [{"places": 1, "latency_s": 0, "bandwidth_bytes_per_s": 4.0}]
    inside = {"latency_s": 0, "bandwidth_bytes_per_s": 2.0}
    made = with_values(cluster({"tree": tree}, inside=inside), {"inside_bandwidth": 6.0})
    assert [level.bandwidth_bytes_per_s for level in made.machines[0].tree] == [12.0]
    assert made.inside.bandwidth_bytes_per_s == 6.0
