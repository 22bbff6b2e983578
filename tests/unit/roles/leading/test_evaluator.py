"""The evaluator: bounded, in order, and by a rule that is reported where it falls behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyrhythm.communication.activity import Activity
from polyrhythm.errors import RunError
from polyrhythm.roles.checkpointing.model_snapshot import ModelSnapshot
from polyrhythm.roles.leading.evaluator import Evaluator, ModelTest


class Bench:
    """An evaluator whose evaluations wait until a file exists."""

    def __init__(self, folder: Path, **rules: bool) -> None:
        self.gate = folder / "gate"
        self.notices: list[str] = []
        self.results: list[tuple[int, float]] = []
        world: Any = SimpleNamespace(pace=None, activity=Activity())
        self.evaluator = Evaluator(
            world, lambda notice: self.notices.append(notice.text), **{"skips": True} | rules
        )

    def begin(self, step: int, evaluate: Callable[[ModelSnapshot], float] | None = None) -> None:
        model = ModelSnapshot(0, step, 0.0, torch.full((3,), float(step)), {})
        done = lambda snapshot, found: self.results.append((snapshot.step, found))  # noqa: E731
        self.evaluator.begin(ModelTest(model, evaluate or self.evaluate, done))

    def evaluate(self, model: ModelSnapshot) -> float:
        while not self.gate.exists():
            time.sleep(0.01)
        return float(model.parameters.sum())


def test_the_waiting_one_is_left_out_where_a_newer_one_is_due(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in (1, 2, 3, 4):
        bench.begin(step)
        assert len(bench.evaluator.pending) <= 2
    bench.gate.touch()
    bench.evaluator.wait()
    assert bench.results == [(1, 3.0), (4, 12.0)]
    assert bench.notices == [
        "tests take longer than the steps between them: that of step 2 is skipped, and so is each that still waits "
        "when a newer one is due"
    ]


def test_steps_wait_where_none_is_to_be_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, skips=False)
    bench.gate.touch()
    for step in (1, 2, 3, 4):
        bench.begin(step)
        assert len(bench.evaluator.pending) <= 2
    bench.evaluator.wait()
    assert bench.results == [(1, 3.0), (2, 6.0), (3, 9.0), (4, 12.0)]


def test_a_process_that_always_dies_gives_way_to_tests_in_place(tmp_path: Path) -> None:
    bench, here = Bench(tmp_path), os.getpid()

    def mortal(model: ModelSnapshot) -> float:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(model.step)

    bench.begin(1, mortal)
    bench.begin(2, mortal)
    bench.evaluator.wait()
    bench.begin(3, mortal)
    assert bench.results == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [text.split(", since")[0] for text in bench.notices] == [
        "the test of step 1 is repeated",
        "the test of step 1 is repeated in place, as are all from here on",
    ]


def test_a_waiting_one_stays_while_another_is_repeated(tmp_path: Path) -> None:
    bench, died = Bench(tmp_path, skips=False), tmp_path / "died"

    def once_mortal(model: ModelSnapshot) -> float:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return float(model.step)

    for step in (1, 2, 3):
        bench.begin(step, once_mortal)
        assert len(bench.evaluator.pending) <= 2
    bench.evaluator.wait()
    assert bench.results == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("skips", [False, True])
def test_a_failure_names_its_step(tmp_path: Path, skips: bool) -> None:
    bench = Bench(tmp_path, skips_failures=skips)
    bench.gate.touch()

    def failing(model: ModelSnapshot) -> float:
        raise RunError("no such column")

    bench.begin(1, failing)
    if not skips:
        with pytest.raises(RunError, match=r"^the test of step 1 failed: no such column$"):
            bench.evaluator.wait()
        return
    bench.evaluator.wait()
    bench.begin(2)
    bench.evaluator.wait()
    assert bench.notices == ["the test of step 1 failed: no such column; it is skipped"]
    assert bench.results == [(2, 6.0)]
