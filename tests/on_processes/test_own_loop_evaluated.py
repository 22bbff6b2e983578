"""`group.evaluate_async`: results of a copy of the model, while the loop's steps continue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from on_processes import evaluated_loop_task
from on_processes.forked_script import run_forked
from polyrhythm.errors import RunError
from polyrhythm.events import Evaluated, Logged
from polyrhythm.reporting.event_log import read_events

TASK = evaluated_loop_task.__file__


@pytest.mark.parametrize("strategy", ["synchronous", "ad_psgd"])
def test_results_are_those_of_the_model_in_place(strategy: str, tmp_path: Path) -> None:
    run_forked(TASK, [strategy, str(tmp_path)], tmp_path, workers=2, restarts=0)
    in_place, found, steps = json.loads((tmp_path / "found.json").read_text())
    assert len(in_place) == evaluated_loop_task.EPOCHS
    assert found == in_place
    events = list(read_events(tmp_path / "report" / "events.jsonl"))
    tests = [event for event in events if isinstance(event, Evaluated)]
    assert [event.test_loss for event in tests] == [each["test_loss"] for each in in_place]
    assert [event.step for event in tests] == steps
    assert all(event.snapshot_s is not None and event.snapshot_s <= event.time_s for event in tests)
    logged = [event for event in events if isinstance(event, Logged)]
    assert [(event.step, event.values) for event in logged] == [
        (step, {"bias": each["bias"]}) for step, each in zip(steps, in_place, strict=True)
    ]


def test_a_function_that_fails_ends_the_loop_with_its_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError):
        run_forked(TASK, ["synchronous", str(tmp_path), "raise"], tmp_path, workers=1, restarts=0)
    said = capfd.readouterr().err + "".join(path.read_text() for path in tmp_path.rglob("*.err"))
    assert "the test of step 24 (epoch 2) failed: ValueError: no such column" in said
    assert not (tmp_path / "found.json").exists()


def test_a_function_that_fails_is_left_out_on_request(tmp_path: Path) -> None:
    run_forked(TASK, ["synchronous", str(tmp_path), "skip"], tmp_path, workers=1, restarts=0)
    in_place, found, _ = json.loads((tmp_path / "found.json").read_text())
    assert found[1] is None
    assert (found[0], found[2]) == (in_place[0], in_place[2])
