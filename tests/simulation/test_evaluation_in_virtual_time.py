"""Tests in virtual time: they take the cluster's `evaluation_s`, in place or next to steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyrhythm.api.simulate import simulate
from polyrhythm.events import Evaluated, Notice
from polyrhythm.reporting.event_log import read_events
from polyrhythm.simulation.cluster import Cluster

JOB: dict[str, Any] = {"data": "digits", "model": "mlp(hidden=[4])", "workers": 1, "epochs": 3}
STEPS, STEP_S, TEST_S = 23, 0.1, 1.0


def cluster(cores: int, evaluation_s: float = TEST_S) -> Cluster:
    return Cluster.model_validate(
        {
            "name": "one",
            "hosts": [{"name": "host", "count": 1, "cores": cores}],
            "nic": {"bandwidth_bytes_per_s": 1e9, "latency_s": 0},
            "inside": {"bandwidth_bytes_per_s": 1e9, "latency_s": 0},
            "evaluation_s": evaluation_s,
            "step_time": f"constant(seconds={STEP_S})",
        }
    )


def found_in(run: Any) -> list[Evaluated]:
    return [event for event in read_events(run.folder / "events.jsonl") if isinstance(event, Evaluated)]


def seconds(folder: Path, cores: int, how: str, **changed: Any) -> float:
    run = simulate(cluster=cluster(cores), evaluation=how, out=folder, **JOB | changed)
    return float(run.figures["seconds"])


def test_steps_continue_and_share_the_processors(tmp_path: Path) -> None:
    whole = 3 * STEPS * STEP_S
    in_place = seconds(tmp_path / "a", 2, "in_place")
    assert in_place == pytest.approx(whole + 3 * TEST_S, abs=0.01)
    # On 4 cores a test takes a quarter of them, on 2 half: steps during it take 4/3 and 2 times as long.
    by_cores = {cores: seconds(tmp_path / str(cores), cores, "async") for cores in (2, 4)}
    for cores, found in by_cores.items():
        slower = 2 * TEST_S / cores  # seconds of work that two tests take from steps
        assert found == pytest.approx(whole + TEST_S + slower, abs=2 * STEP_S), cores
    assert by_cores[4] < by_cores[2] < in_place


def test_results_are_known_when_the_test_is_over(tmp_path: Path) -> None:
    run = simulate(cluster=cluster(8), evaluation="async", out=tmp_path / "a", **JOB)
    other = simulate(cluster=cluster(8), out=tmp_path / "b", **JOB)
    for event, in_place in zip(found_in(run)[:-1], found_in(other), strict=False):
        assert (event.step, event.test_loss) == (in_place.step, in_place.test_loss)
        assert event.snapshot_s is not None
        assert TEST_S <= event.time_s - event.snapshot_s <= TEST_S + 2 * STEP_S
    assert run.figures["parameters_sha256"] == other.figures["parameters_sha256"]


def test_a_target_is_reached_a_test_later(tmp_path: Path) -> None:
    target = found_in(simulate(cluster=cluster(8), out=tmp_path / "a", **JOB))[0].test_loss
    run = simulate(
        cluster=cluster(8), evaluation="async", until=f"loss={target!r}", out=tmp_path / "b", **JOB
    )
    (found,) = found_in(run)
    assert (found.epoch, found.test_loss) == (1, target)
    assert run.figures["reached"] is True
    assert run.figures["test_loss"] == target
    assert STEPS + TEST_S / STEP_S <= run.figures["steps"] + 2 <= 2 * STEPS


@pytest.mark.parametrize(("cores", "continues"), [(1, False), (2, True)])
def test_auto_follows_the_free_cores(cores: int, continues: bool, tmp_path: Path) -> None:
    run = simulate(cluster=cluster(cores), evaluation="auto", out=tmp_path / "a", **JOB)
    assert (found_in(run)[0].snapshot_s is not None) is continues
    said = [
        event.text
        for event in read_events(tmp_path / "a" / "events.jsonl")
        if isinstance(event, Notice) and "tests are in place" in event.text
    ]
    assert len(said) == (not continues)
