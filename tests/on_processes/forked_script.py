"""Ranks of a script, forked from a clean process that has its imports, in place of one start of Python each."""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.clean_process import CONTEXT
from polyrhythm.launch import script as script_ranks
from polyrhythm.launch.script import run_script

_BEFORE_SCRIPT = 6
"""Words of a rank's command that only start Python."""


class ForkedRank:
    """Used like `Popen`, as far as a launcher of scripts does."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str], errors: Path, **_: Any) -> None:
        given = (list(command[_BEFORE_SCRIPT:]), env, str(errors / f"{secrets.token_hex(4)}.err"))
        self._process = CONTEXT.Process(target=_run_rank, args=given, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        status: int | None = self._process.exitcode
        return status

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_rank(command: list[str], variables: dict[str, str], errors: str) -> None:
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(variables)
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    script_ranks._THIS_PROCESS = secrets.token_hex(8)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def run_forked(script: str, arguments: Sequence[str], folder: Path, *, workers: int, restarts: int) -> str:
    """Runs a script as `polyrhythm run` does; gives what its ranks have written to their standard errors.

    Args:
        script: a Python file.
        arguments: for it.
        folder: takes what they write, a file each.
        workers: how many.
        restarts: how many successors of lost ranks there may be.
    """

    def start(command: Sequence[str], **given: Any) -> ForkedRank:
        return ForkedRank(command, errors=folder, **given)

    popen = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script_ranks, "subprocess", popen)
        run_script(script, arguments, workers=workers, threads=1, restarts=restarts)
    return "".join(path.read_text() for path in sorted(folder.glob("*.err")))
