"""Processes that make runs one after another, so that memory leaks and crashes of a run end with its process.

    planner                                the process
    {"folder": …, "options": …}    ──▶     a run in that folder
                                   ◀──     {"tested": …}         after every test, if the task asks for it
    {"goes_on": true}              ──▶     continues, or is interrupted
                                   ◀──     {"outcome": …, …}

Both write one JSON object a line. What the process does is in `run_server.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polyrhythm.specs import environment_of_classes

INTERRUPTED = 130
FIGURES = ("test_top1", "test_top5", "test_loss", "images_per_s", "seconds", "price", "epochs", "reached")
"""Those of a run that an answer has."""
Judge = Callable[[int, Mapping[str, float]], bool]
"""Called with the epochs done and the results of a test (`top1`, `top5`, `loss`, `time_s`); whether to continue."""


class RunProcess:
    """A process that makes runs; it is started again when it dies.

    Args:
        apart: whether signals of the terminal do not reach it, only those of `interrupt`.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        self._process = self._started()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", "from polyrhythm.api.run_server import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, **environment_of_classes()},
            start_new_session=self._apart,
        )

    def interrupt(self) -> None:
        """Have the run in progress stop as Ctrl-C does, with a checkpoint; `make` then returns."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def make(self, task: Mapping[str, Any], judge: Judge | None = None) -> dict[str, Any]:
        """Have one run made.

        Args:
            task: `folder`, `options`, `simulation` (of `simulate`; empty: a real run), and perhaps `begin_from`.
            judge: function that returns after every test whether the run continues; None: it always does.

        Returns:
            `outcome`: done, stopped (by the judge), interrupted (by the user), refused or failed, the last two with
            `error`; else figures of the run.
        """
        assert self._process.stdin is not None
        answer = self._exchange({**task, "judged": judge is not None})
        while answer is not None and "tested" in answer:
            assert judge is not None
            answer = self._exchange({"goes_on": judge(answer["epoch"], answer["tested"])})
        if answer is not None:
            return answer
        self.close()
        status = self._process.returncode
        if status in {INTERRUPTED, -signal.SIGINT}:
            return {"outcome": "interrupted"}
        self._process = self._started()
        return {"outcome": "failed", "error": f"its process ended with status {status}", "died": True}

    def _exchange(self, what: Mapping[str, Any]) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def close(self) -> None:
        """Wait until the run in progress has ended, and end the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
