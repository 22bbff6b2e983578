from __future__ import annotations

import json
from multiprocessing import Pipe

import pytest
import torch

from polyrhythm.cli.main import _said
from polyrhythm.errors import lack_of_memory
from polyrhythm.launch.child import _report

HUGE = 1 << 60


def test_memory_that_torch_cannot_have_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(HUGE)
    assert _said(caught.value) == 1
    assert capsys.readouterr().err.startswith("error: memory is not enough: take a smaller --batch-size")


def test_a_worker_tells_it_as_a_failure_and_not_as_a_bug() -> None:
    here, there = Pipe()
    _report(there, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    told = json.loads(here.recv_bytes())
    assert told["kind"] == "run"
    assert told["error"].startswith("memory is not enough")


def test_other_errors_stay_what_they_are() -> None:
    assert lack_of_memory(RuntimeError("the shapes differ")) is None
    assert isinstance(lack_of_memory(MemoryError()), RuntimeError)
