"""`--until`: a test that reaches the target ends training, which then is as done as after its last epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.api.evaluate import evaluate
from polyrhythm.api.observed_run import finished_run
from polyrhythm.api.simulate import simulate
from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Notice
from polyrhythm.reporting.event_log import read_events

JOB = {"cluster": "office", "data": "digits", "model": "mlp", "workers": 3, "epochs": 8}


def evaluations(folder: Path) -> list[Evaluated]:
    return [event for event in read_events(folder / "events.jsonl") if isinstance(event, Evaluated)]


@pytest.mark.parametrize(
    "strategy", ["synchronous", "local_sgd(steps=3)", "parameter_server(servers=1)", "ad_psgd", "ssp"]
)
def test_training_ends_after_the_first_test_that_reaches_the_target(strategy: str, tmp_path: Path) -> None:
    whole = simulate(strategy=strategy, out=tmp_path / "whole", **JOB)
    tests = evaluations(tmp_path / "whole")
    target = tests[3].test_loss
    first = next(index for index, event in enumerate(tests) if event.test_loss <= target)
    run = simulate(strategy=strategy, until=f"loss={target!r}", out=tmp_path / "cut", **JOB)
    found = evaluations(tmp_path / "cut")
    assert found[: first + 1] == tests[: first + 1]  # until then it is the same run
    assert len(found) == first + 1
    assert run.outcome == "done"
    assert run.figures["reached"] is True
    assert run.figures["steps"] < whole.figures["steps"]
    assert (tmp_path / "cut" / "model.safetensors").is_file()
    assert evaluate(tmp_path / "cut")["test_loss"] == found[-1].test_loss
    assert finished_run(tmp_path / "cut") is not None
    said = [
        event.text for event in read_events(tmp_path / "cut" / "events.jsonl") if isinstance(event, Notice)
    ]
    assert f"the test after epoch {first + 1} has reached loss {target:g}: training ends" in said


def test_a_target_that_is_not_reached_changes_nothing_but_says_so(tmp_path: Path) -> None:
    whole = simulate(out=tmp_path / "whole", **JOB)
    run = simulate(until="top1=1", out=tmp_path / "far", **JOB)
    assert run.figures["parameters_sha256"] == whole.figures["parameters_sha256"]
    assert run.figures["reached"] is False
    assert "reached" not in whole.figures


@pytest.mark.parametrize("until", ["top1=90", "speed=3"])
def test_a_target_that_cannot_be_is_refused(until: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="write top1="):
        simulate(until=until, out=tmp_path / "a", **JOB)
    assert not (tmp_path / "a").exists()
    with pytest.raises(RequestError, match="--until means nothing"):
        simulate(until="top1=0.5", gradients="none", out=tmp_path / "a", cluster="office")
