"""Processes that make runs one after another, so that what a run leaves in memory or breaks ends with its process.

    who plans                              the process
    {"folder": …, "options": …}    ──▶     a run in that folder
                                   ◀──     {"tested": …}         after every test, if the task asks for it
    {"goes_on": true}              ──▶     goes on, or is interrupted
                                   ◀──     {"outcome": …, …}

Both write one JSON object a line. A task may name a folder to begin from: its checkpoints are copied first.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyrhythm.api.ddp import NAME as DDP
from polyrhythm.api.observed_run import Run
from polyrhythm.config.recipe import CONFIG_FILE
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Evaluated, Event

INTERRUPTED = 130
FIGURES = ("test_top1", "test_top5", "test_loss", "images_per_s", "seconds", "price", "epochs", "reached")
"""Those of a run that an answer has."""
Judge = Callable[[int, Mapping[str, float]], bool]
"""Called with the epochs done and the results of a test (`top1`, `top5`, `loss`); whether the run goes on."""


class RunProcess:
    """A process that makes runs; it is started again when it dies."""

    def __init__(self) -> None:
        self._process = self._started()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", "from polyrhythm.api.run_process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def make(self, task: Mapping[str, Any], judge: Judge | None = None) -> dict[str, Any]:
        """Have one run made.

        Args:
            task: `folder`, `options`, `simulation` (of `simulate`; empty: a real run), and perhaps `begin_from`.
            judge: decides after every test whether the run goes on; None: nobody asks.

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
        """Wait until the run under way has ended, and end the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class _Judged:
    """An observer that asks after every test whether the run goes on, and else interrupts it as Ctrl-C does."""

    def __init__(self, ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._ask = ask
        self.stopped = False

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Evaluated) or self.stopped:
            return
        tested = {"top1": event.test_top1, "top5": event.test_top5, "loss": event.test_loss}
        if not self._ask({"epoch": event.epoch, "tested": tested})["goes_on"]:
            self.stopped = True
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        """Nothing is open."""


def serve() -> None:
    """Make the runs that standard input names, as the module describes; answers go to standard output."""
    from polyrhythm.api.train import prepare_process

    answers, sys.stdout = sys.stdout, sys.stderr
    prepare_process()

    def tell(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def ask(question: Mapping[str, Any]) -> Any:
        tell(question)
        line = sys.stdin.readline()
        return json.loads(line) if line else {"goes_on": False}  # whoever planned it is gone

    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        judged = _Judged(ask) if task["judged"] else None
        try:
            answer = _made(task, judged)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        if answer["outcome"] == "interrupted":
            if judged is None or not judged.stopped:
                sys.exit(INTERRUPTED)
            answer["outcome"] = "stopped"
        tell(answer)


def _made(task: Mapping[str, Any], judged: _Judged | None) -> dict[str, Any]:
    from polyrhythm.api.ddp import train_with_ddp
    from polyrhythm.api.simulate import simulate
    from polyrhythm.api.train import train

    folder, simulation, options = Path(task["folder"]), task["simulation"], task["options"]
    observers = [judged] if judged is not None else []
    begin_from = task.get("begin_from")
    run: Run | None
    try:
        if simulation:
            shutil.rmtree(folder, ignore_errors=True)  # what is left of one that was cut short
            run = simulate(out=folder, observers=observers, **simulation, **options)
        elif options.get("strategy") == DDP:
            shutil.rmtree(folder, ignore_errors=True)
            run = train_with_ddp(out=folder, **options)
        elif begin_from is not None:
            if not folder.exists():  # whole or not at all
                draft = folder.with_name(f".{folder.name}.draft")
                shutil.rmtree(draft, ignore_errors=True)
                shutil.copytree(begin_from, draft)
                draft.rename(folder)
            run = train(resume=folder, start_method="fork", observers=observers, **options)
        elif (folder / CONFIG_FILE).is_file():
            run = train(resume="auto", out=folder, start_method="fork", observers=observers)
        else:
            run = train(out=folder, start_method="fork", observers=observers, **options)
    except RequestError as error:
        return {"outcome": "refused", "error": str(error)}
    except RunError as error:
        return {"outcome": "failed", "error": str(error).splitlines()[0]}
    assert run is not None
    return {"outcome": run.outcome, **{key: run.figures.get(key) for key in FIGURES}}
