"""Tests while steps continue, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.api.evaluate import evaluate
from polyrhythm.api.replay import replay
from polyrhythm.api.train import train
from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Notice
from polyrhythm.launch import process
from polyrhythm.reporting.event_log import read_events
from polyrhythm.reporting.summary import read_summary
from polyrhythm.roles.leading import training_duties

JOB: dict[str, Any] = {
    "data": "digits",
    "model": "mlp(hidden=[8])",
    "workers": 2,
    "threads": 1,
    "balance": "off",  # by measured speeds, two runs may divide batches otherwise
    "start_method": "fork",
}
IMAGES = 1438  # that `digits` trains with
PLAIN = training_duties.evaluate


def results_of(folder: Path) -> list[tuple[float | int | None, ...]]:
    return [
        (event.epoch, event.step, event.test_loss, event.test_top1, event.test_top5)
        for event in read_events(folder / "events.jsonl")
        if isinstance(event, Evaluated)
    ]


def notices_of(folder: Path) -> str:
    return "\n".join(
        event.text for event in read_events(folder / "events.jsonl") if isinstance(event, Notice)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "synchronous"},
        {"strategy": "local_sgd(steps=4)", "keep_best": True},
        {"strategy": "d_psgd"},
        {"strategy": "hogwild", "workers": 1},  # its parameters are in memory that processes share
        {"strategy": "synchronous", "weight_average": 0.9},
    ],
    ids=lambda changed: changed["strategy"],
)
def test_results_are_those_of_tests_in_place(changed: dict[str, Any], tmp_path: Path) -> None:
    runs = {
        how: train(
            out=tmp_path / how, evaluation=how, epochs=4, until="top1=1", **JOB | changed
        )  # needs all tests
        for how in ("in_place", "async")
    }
    assert results_of(tmp_path / "async") == results_of(tmp_path / "in_place")
    same = [run.figures["parameters_sha256"] for run in runs.values() if run is not None]
    assert same[0] == same[1]
    best = [sorted(path.name for path in (tmp_path / how).glob("checkpoints/best-*")) for how in runs]
    assert best[0] == best[1] or any("is skipped there" in notices_of(tmp_path / how) for how in runs)
    # Curves over images place a result at its model, as closely as the other worker's reports allow.
    images = [test.images for test in read_summary(tmp_path / "async").tests]
    assert images == sorted(images)
    assert all(count <= epoch * IMAGES for epoch, count in enumerate(images, 1))
    if changed["strategy"] == "synchronous":
        assert replay(tmp_path / "async")["same"]


def slow(model: Any, *split: Any, **options: Any) -> Any:
    time.sleep(0.5)
    return PLAIN(model, *split, **options)


def test_the_model_that_has_reached_the_target_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB | {"strategy": "synchronous", "epochs": 30, "until": "top1=0.8"}
    first = train(out=tmp_path / "in_place", **job)
    monkeypatch.setattr(training_duties, "evaluate", slow)
    run = train(out=tmp_path / "async", evaluation="async", **job)
    assert first is not None
    assert run is not None
    assert run.figures["reached"] is True
    assert run.figures["steps"] > first.figures["steps"]  # steps had continued
    results = results_of(tmp_path / "async")
    assert results == results_of(tmp_path / "in_place")  # no test is left out, and none is made twice
    for how in ("in_place", "async"):
        kept = evaluate(tmp_path / how)
        assert (kept["test_loss"], kept["test_top1"]) == results[-1][2:4]
    with pytest.raises(RequestError, match="ended by a test while steps continued: the times of the stops"):
        replay(tmp_path / "async")


def test_a_killed_test_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOB | {"epochs": 4, "workers": 1, "until": "top1=1"}  # needs all tests
    train(out=tmp_path / "in_place", **job)
    died = tmp_path / "died"

    def mortal(model: Any, *split: Any, **options: Any) -> Any:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return PLAIN(model, *split, **options)

    monkeypatch.setattr(training_duties, "evaluate", mortal)
    train(out=tmp_path / "async", evaluation="async", **job)
    assert results_of(tmp_path / "async") == results_of(tmp_path / "in_place")
    assert "the test of step 23 (epoch 1) is repeated, since its process has died (signal 9)" in notices_of(
        tmp_path / "async"
    )


def test_a_failed_test_ends_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: Any, *split: Any, **options: Any) -> Any:
        raise RequestError("none of the test images can be read")

    monkeypatch.setattr(training_duties, "evaluate", failing)
    line = r"the test of step 23 \(epoch 1\) failed: none of the test images can be read"
    with pytest.raises(RequestError, match=line):
        train(out=tmp_path / "run", evaluation="async", epochs=3, **JOB | {"workers": 1})


def _until_killed(folder: Path) -> None:
    os.setpgrp()

    def endless(*_: Any, **__: Any) -> Any:
        time.sleep(100)

    training_duties.evaluate = endless  # type: ignore[assignment]
    train(out=folder, evaluation="async", epochs=2, checkpoint_every="5steps", **JOB)


def test_a_test_that_was_lost_with_its_run_is_made_up_for(tmp_path: Path) -> None:
    train(out=tmp_path / "whole", epochs=2, **JOB)
    killed = multiprocessing.get_context("fork").Process(target=_until_killed, args=(tmp_path / "run",))
    killed.start()
    assert killed.pid is not None

    def newest() -> str:
        found = sorted((tmp_path / "run" / "checkpoints").glob("step-*.safetensors"))
        return found[-1].name if found else ""

    until_s = time.monotonic() + 120
    while newest() < "step-00000015":  # the first epoch has 12 steps, and its test does not end
        assert time.monotonic() < until_s
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.join()
    run = train(resume=tmp_path / "run", start_method="fork")
    assert run is not None
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")


@pytest.mark.parametrize("how", ["in_place", "async"])
def test_results_that_a_killed_launcher_has_not_logged_are_announced(how: str, tmp_path: Path) -> None:
    folder, every = tmp_path / "run", {"checkpoint_every": "5steps", "keep_checkpoints": 100}
    train(out=folder, evaluation=how, epochs=4, until="top1=1", **JOB | every)
    whole, log = results_of(folder), folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if '"Evaluated"' in line)
    log.write_text("".join(lines[: first + 1]))  # the ranks have continued until they found the launcher dead
    for path in (folder / "checkpoints").glob("step-*.safetensors"):
        if path.name > "step-00000040":  # in the fourth epoch
            path.unlink()
    assert train(resume=folder, start_method="fork") is not None
    assert results_of(folder) == whole


@pytest.mark.parametrize("how", ["in_place", "async"])
def test_a_run_killed_after_it_has_reached_its_target_ends_by_it_when_resumed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, every = tmp_path / "run", {"checkpoint_every": "5steps", "keep_checkpoints": 100}
    monkeypatch.setattr(training_duties, "evaluate", slow)
    whole = train(out=folder, evaluation=how, epochs=30, until="top1=0.8", **JOB | every)
    assert whole is not None
    results, log = read_summary(folder).tests, folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(
        "".join(line for line in lines if '"RunEnded"' not in line)
    )  # it was killed before its end
    run = train(resume=folder, start_method="fork")
    assert run is not None
    assert run.figures["parameters_sha256"] == whole.figures["parameters_sha256"]
    again = read_summary(folder).tests
    assert [astuple(test.event)[1:6] for test in again] == [astuple(test.event)[1:6] for test in results]


def _launched(folder: Path) -> None:
    process._LOOK_EVERY_S = 1000.0  # ranks never find by looking that they are alone
    train(out=folder, epochs=100_000, checkpoint_every="5steps", schedule="constant", **JOB)


def test_ranks_of_a_killed_launcher_end_at_their_next_report(tmp_path: Path) -> None:
    """By looking, one would end up to a second after another, and save what it computed alone."""
    launcher = multiprocessing.get_context("fork").Process(target=_launched, args=(tmp_path / "run",))
    launcher.start()
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    until_s = time.monotonic() + 120
    while not list((tmp_path / "run/checkpoints").glob("step-*")):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    ranks = children.read_text().split()
    launcher.kill()
    launcher.join()
    left, until_s = ranks, time.monotonic() + 60
    while left and time.monotonic() < until_s:
        left = [rank for rank in left if Path(f"/proc/{rank}").exists()]
        time.sleep(0.01)
    for rank in left:
        os.kill(int(rank), signal.SIGKILL)
    assert (len(ranks), left) == (2, [])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"strategy": "pipeline"}, "compute one network together"),
    ],
)
def test_what_cannot_be_tested_so_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=why):
        train(out=tmp_path / "run", evaluation="async", epochs=2, **JOB | options)
    assert not (tmp_path / "run").exists()


def test_auto_is_in_place_without_a_free_core(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    train(out=tmp_path / "run", evaluation="auto", epochs=1, **JOB | {"workers": 1, "threads": cores})
    assert "tests are in place, since a test computes with" in notices_of(tmp_path / "run")
