from __future__ import annotations

import errno
import json
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from polyrhythm.cli.main import _print_error
from polyrhythm.errors import fault_of_machine, unknown
from polyrhythm.launch.children import _report

HUGE = 1 << 60


def test_memory_that_torch_cannot_have_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(HUGE)
    assert _print_error(caught.value) == 1
    assert capsys.readouterr().err.startswith("error: memory is not enough: take a smaller --batch-size")


def test_a_worker_tells_it_as_a_failure_and_not_as_a_bug() -> None:
    here, there = Pipe()
    _report(there, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    told = json.loads(here.recv_bytes())
    assert told["kind"] == "run"
    assert told["error"].startswith("memory is not enough")


def test_a_disk_that_cannot_be_written_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        Path("/dev/full").write_text("more than fits")
    assert _print_error(caught.value) == 1
    assert capsys.readouterr().err == "error: No space left on device\n"
    assert _print_error(OSError(errno.EROFS, "Read-only file system", "/mnt/sheet.png")) == 1
    assert capsys.readouterr().err == "error: Read-only file system: /mnt/sheet.png\n"


def test_other_errors_stay_what_they_are() -> None:
    assert fault_of_machine(RuntimeError("the shapes differ")) is None
    assert fault_of_machine(FileNotFoundError(errno.ENOENT, "No such file or directory")) is None
    assert isinstance(fault_of_machine(MemoryError()), RuntimeError)


def test_only_names_that_are_much_alike_are_suggested() -> None:
    networks = [*(f"network{number}" for number in range(20)), "iformer_l", "resnet50"]
    assert "did you mean" not in str(unknown("model", "nomodel", ["iformer_l", "lenet5", "resnet50"]))
    assert str(unknown("model", "nothing", networks)).endswith(
        "there are 22, such as network0, network1, network2, network3, network4"
    )
    assert str(unknown("model", "resnt50", networks)) == "unknown model 'resnt50': did you mean resnet50?"
