"""A test while steps continue has the bits of one in place, and changes nothing of the training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.jobs import make_job, named, simulated, strategies, strategy, with_batch_norm
from polyrhythm.events import Evaluated
from polyrhythm.roles.job import EvaluationPlan
from polyrhythm.roles.world import DrawnPace

WORKERS, EPOCHS = 3, 3
WHOLE = [spec for spec in strategies() if not strategy(spec).traits(WORKERS).cuts_network]


def results_of(events) -> list[tuple[float | int, ...]]:
    return [
        (event.epoch, event.step, event.test_loss, event.test_top1, event.test_top5)
        for event in events
        if isinstance(event, Evaluated)
    ]


@pytest.mark.parametrize("spec", named(WHOLE))
def test_results_are_those_of_tests_in_place(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(spec, WORKERS, model=with_batch_norm, epochs=EPOCHS)
    in_place = simulated(job)
    # Steps take 0.01 s: some are taken during a test.
    monkeypatch.setattr(
        "polyrhythm.simulation.simulated_run.DrawnPace",
        lambda clock, draw_s: DrawnPace(clock, draw_s, evaluation_s=0.025),
    )
    continued = simulated(replace(job, evaluation=EvaluationPlan(continues=True)))
    assert results_of(continued.events) == results_of(in_place.events)
    assert continued.result["parameters_sha256"] == in_place.result["parameters_sha256"]
    late = [event for event in continued.events if isinstance(event, Evaluated) and event.epoch < EPOCHS]
    assert all(event.time_s >= event.snapshot_s + 0.025 for event in late)
