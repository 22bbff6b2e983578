"""The command that checks everything on a GPU: what of it can be tried without one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(GPU))
    import check as module

    yield module
    del sys.modules["check"]


def ended(check: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
    return int(check.main())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_a_line(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(check, monkeypatch) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("no GPU is here")


def test_what_holds_what_does_not_and_what_cannot_be_tried_are_told_apart(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(place: Any) -> dict[str, Any]:
        raise ZeroDivisionError("of all things")

    monkeypatch.setitem(check.CHECKS, "device ranks", raises)
    out = tmp_path / "results.json"
    arguments = [
        "--device",
        "cpu",
        "--quick",
        "--out",
        str(out),
        "--only",
        "device ranks",
        "pinned copies",
        "NCCL",
    ]
    assert ended(check, monkeypatch, *arguments) == 1
    rows = json.loads(out.read_text())["checks"]
    assert [(row["check"], row["outcome"]) for row in rows] == [
        ("device ranks", "FAILED"),
        ("pinned copies", "ok"),
        ("NCCL", "left out"),
    ]
    assert "ZeroDivisionError: of all things" in capsys.readouterr().out
    assert ended(check, monkeypatch, *arguments[:3], "--only", "pinned copies", "NCCL") == 0


def test_a_copy_that_is_torn_is_found(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(source: torch.Tensor, target: torch.Tensor) -> None:
        target[: len(target) // 2].copy_(source[: len(source) // 2])

    monkeypatch.setattr(check, "Staging", lambda copy, pinned: staging(late, pinned=pinned))
    from polyrhythm.communication.transports.torch_distributed.communicator import Staging as staging

    with pytest.raises(check.Failed, match="torn"):
        check.pinned_copies(check.Place("cpu", tmp_path, quick=True))
