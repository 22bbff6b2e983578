"""Main loop of a process that makes runs for another one, which sends it folders and options; see `run_process.py`.

A task may name a folder to begin from: its checkpoints are copied first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyrhythm.api.ddp import NAME as DDP
from polyrhythm.api.ddp import train_with_ddp
from polyrhythm.api.observed_run import Run
from polyrhythm.api.run_process import FIGURES, INTERRUPTED
from polyrhythm.api.simulate import simulate
from polyrhythm.api.train import prepare_process, train
from polyrhythm.config.recipe import CONFIG_FILE
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Evaluated, Event


class _Judged:
    """An observer that asks after every test whether the run continues, and else interrupts it as Ctrl-C does."""

    def __init__(self, ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._ask = ask
        self.stopped = False

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Evaluated) or self.stopped:
            return
        tested = {"top1": event.test_top1, "top5": event.test_top5, "loss": event.test_loss}
        tested["time_s"] = event.time_s
        if not self._ask({"epoch": event.epoch, "tested": tested})["goes_on"]:
            self.stopped = True
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        """Nothing is open."""


def serve() -> None:
    """Make the runs that standard input names, as `run_process.py` describes; answers go to standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr
    prepare_process()

    def notify(answer: Mapping[str, Any]) -> None:
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except BrokenPipeError:  # the planning process is gone, and there is no receiver
            with open(os.devnull, "w") as nobody:
                os.dup2(nobody.fileno(), answers.fileno())  # buffered output goes there at the end

    def ask(question: Mapping[str, Any]) -> Any:
        notify(question)
        line = sys.stdin.readline()
        return json.loads(line) if line else {"goes_on": False}  # as above

    def next_line() -> str:
        try:
            return sys.stdin.readline()
        except KeyboardInterrupt:  # between two runs
            sys.exit(INTERRUPTED)

    for line in iter(next_line, ""):
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
        notify(answer)


def _made(task: Mapping[str, Any], judged: _Judged | None) -> dict[str, Any]:
    folder, simulation, options = Path(task["folder"]), task["simulation"], task["options"]
    observers = [judged] if judged is not None else []
    begin_from = task.get("begin_from")
    run: Run | None
    try:
        if simulation:
            shutil.rmtree(folder, ignore_errors=True)  # rest of a copy that was cut short
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
