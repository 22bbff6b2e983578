"""A worker that hangs is named, with its step and the line of its script; one that gives no answer too."""

from __future__ import annotations

import re
from collections.abc import Callable
from queue import Queue
from threading import Event

import pytest
import torch
from torch import nn

from polyrhythm.api import join
from polyrhythm.api.join import Group
from polyrhythm.api.loop.store_board import LoopWatch
from unit.api.loop.threads import run_in_threads


@pytest.mark.parametrize(
    "strategy", ["synchronous", "parameter_server(consistency=synchronous)", "local_sgd(steps=1)"]
)
def test_a_hung_worker_is_named(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Queue[str] = Queue()
    named = Event()

    def say(text: str) -> None:
        said.put(text)
        named.set()

    def patient(board: object, worker: int, workers: int, steps: Callable[[], int], _: object) -> LoopWatch:
        return LoopWatch(board, worker, workers, steps, say, patience_s=0.2)  # type: ignore[arg-type]

    monkeypatch.setattr(join, "LoopWatch", patient)

    def loop(group: Group) -> None:
        model = nn.Linear(4, 3)
        with group:
            model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                if (group.rank, step) == (1, 2):
                    assert named.wait(30)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()

    run_in_threads(strategy, 2, loop)
    pattern = r"worker 0 waits at step 2 for 0 s \(test_watch\.py:\d+\): worker 1 is at step 2, \d+ s after its last "
    assert re.match(pattern + r"exchange \(test_watch\.py:\d+\)$", said.get())
