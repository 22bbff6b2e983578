"""Batches that grow by the gradient noise scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.jobs import simulated
from polyrhythm.api import growing
from polyrhythm.api.observed_run import Run
from polyrhythm.api.simulate import simulate
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, NoiseMeasured, Notice, RunEnded
from polyrhythm.launch.devices import computing_with
from polyrhythm.reporting.event_log import Observer
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.simulation.run import simulate as run_simulated
from polyrhythm.training.batch_schedules.auto import Auto

JOB: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "epochs": 4,
    "workers": 2,
    "batch_size": 16,
    "seed": 1,
}


@pytest.mark.parametrize(
    ("scale", "first", "expected"),
    [
        (None, 16, (1, 1.0)),
        (31.0, 16, (1, 1.0)),
        (32.0, 16, (2, 3 / 2)),
        (1000.0, 16, (32, 63.5 / (62.5 / 32 + 1))),
        (100_000.0, 16, (64, 6251 / (6250 / 64 + 1))),
    ],
)
def test_a_batch_is_the_largest_that_pays(
    scale: float | None, first: int, expected: tuple[int, float]
) -> None:
    factor, gain = Auto().decided(scale, first, 1_000_000)
    assert (factor, gain) == (expected[0], pytest.approx(expected[1]))
    assert Auto(rate="constant").decided(scale, first, 1_000_000) == (expected[0], 1.0)


def test_a_batch_neither_shrinks_nor_eats_up_an_epoch() -> None:
    assert Auto(factors=(1, 8), gains=(1.0, 3.0)).decided(20.0, 16, 10_000)[0] == 8
    assert Auto().decided(5000.0, 16, 1000)[0] == 4


class Seen:
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_a_run_grows_and_is_that_of_the_batches_it_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured in so short a run is told by the test: 70 images after an epoch, and then 130."""

    def measured(events: Sequence[NoiseMeasured]) -> dict[str, Any] | None:
        return {"images": 70.0 if events[-1].step <= 45 else 130.0} if events else None

    monkeypatch.setattr(growing, "noise_scale", measured)
    seen = Seen()
    run = simulate(
        **JOB, cluster="office", batch_schedule="auto(every=0.25)", out=tmp_path / "run", observers=[seen]
    )
    figures = run.figures
    assert (run.outcome, figures["epochs"]) == ("done", 4)
    assert figures["batches"] == [32, 64, 128, 128]
    first, later = 70 / 32, 130 / 32
    gains = [1.0, (first + 1) / (first / 2 + 1), *[(later + 1) / (later / 4 + 1)] * 2]
    assert figures["batch_gains"] == pytest.approx(gains)
    told = [event.text for event in seen.events if isinstance(event, Notice)]
    assert sum("images from epoch" in text for text in told) == 2
    assert any("steps have 128 images from epoch 3 on" in text for text in told)
    assert sum(isinstance(event, RunEnded) for event in seen.events) == 1
    schedule = Auto(every=0.25, factors=(1, 2, 4, 4), gains=tuple(figures["batch_gains"]))
    job = assemble(configure(JOB | {"batch_schedule": schedule}), CheckpointConfig(checkpoints=0))
    with computing_with(1):  # as the run
        assert simulated(job).sha256 == figures["parameters_sha256"]


def test_a_run_that_was_cut_short_goes_on_with_what_was_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted inside the second epoch, whose batch had grown, and decides nothing about that anew."""

    def measured(events: Sequence[NoiseMeasured]) -> dict[str, Any] | None:
        return {"images": 70.0} if events else None

    monkeypatch.setattr(growing, "noise_scale", measured)
    config = configure(JOB | {"epochs": 3, "batch_schedule": "auto(every=0.4)"})

    def made(folder: Path, stops: list[float | None]) -> Run:
        def play(_number: int, job: Job, watching: Sequence[Observer], last: bool) -> Run:
            events = run_simulated(job, ConstantCluster(stop_at_s=stops.pop(0)))
            for event in events:
                for observer in watching:
                    observer.on_event(event)
            assert isinstance(events[-1], RunEnded)
            return Run(folder, events[-1].outcome, events[-1].result)

        schedule = growing.by_noise(config)
        assert schedule is not None
        return growing.with_growing_batches(schedule, config, folder, [], play)

    whole = made(tmp_path / "whole", [None] * 3)
    assert whole.figures["batches"] == [32, 64, 64]
    assert made(tmp_path / "cut", [None, 0.1]).outcome == "interrupted"
    resumed = made(tmp_path / "cut", [None] * 2)
    assert resumed.figures["batches"] == whole.figures["batches"]
    assert resumed.figures["parameters_sha256"] == whole.figures["parameters_sha256"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workers": 1}, "with 2 workers or more"),
        ({"strategy": "parameter_server"}, "use synchronous"),
        ({"updates": 5, "epochs": None}, "--updates"),
    ],
)
def test_a_run_in_which_nothing_is_measured_is_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        simulate(**(JOB | options), cluster="office", batch_schedule="auto", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
