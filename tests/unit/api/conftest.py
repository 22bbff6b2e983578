"""Processes that make runs, lent to one test after another: to start one takes longer than most tests' runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from polyrhythm.api import compare, tune
from polyrhythm.api.run_process import Judge, RunProcess


class Lent:
    """In place of a `RunProcess`: one that another test has used, if one is free; closed, it is free again."""

    free: ClassVar[list[RunProcess]] = []

    def __init__(self) -> None:
        try:
            self._process = self.free.pop()
        except IndexError:
            self._process = RunProcess()

    def make(self, task: Mapping[str, Any], judge: Judge | None = None) -> dict[str, Any]:
        return self._process.make(task, judge)

    def close(self) -> None:
        self.free.append(self._process)


@pytest.fixture(scope="session")
def _processes() -> Iterator[None]:
    yield
    for process in Lent.free:
        process.close()
    Lent.free.clear()


@pytest.fixture
def lent_processes(_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compare, tune):
        monkeypatch.setattr(module, "RunProcess", Lent)
