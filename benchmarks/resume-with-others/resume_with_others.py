"""Runs that are stopped or killed at random moments, and resumed each time with another number of workers.

    python benchmarks/resume-with-others/resume_with_others.py [--trials 4] [--only NAME …] [--out DIR]

Real processes: `mlp` on `digits`, 8 epochs, a checkpoint every epoch. A trial begins with 3 workers and ends after
three changes to a random number of 1 to 5; before each, the whole run is asked to stop (SIGTERM, with a checkpoint in
the middle of an epoch) or killed (-9, launcher and all), each as likely. Of the last session it is counted whether its
workers have looked at as many images as the checkpoint had left of all epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share
from attempt import Attempt, prepare
from polyrhythm.config.assemble import strategy_from
from polyrhythm.data.dealing import Begun
from polyrhythm.events import RunEnded, RunStarted, WorkerProgress
from polyrhythm.reporting.event_log import read_events
from polyrhythm.roles.job import Calendar
from polyrhythm.training.checkpoint import checkpoints

STRATEGIES = (
    "synchronous",
    "parameter_server(servers=2)",
    "parameter_server(servers=2, consistency=synchronous)",
    "ssp",
    "softsync",
    "dc_asgd",
    "easgd",
    "downpour",
    "local_sgd",
    "diloco",
    "sgp",
    "ad_psgd",
)
IMAGES, WORKERS, CHANGES, MOST = 1438, 3, 3, 5
OPTIONS: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "workers": WORKERS,
    "epochs": 8,
    "batch_size": 8,
    "threads": 1,
    "restarts": 0,
}


@dataclass
class Row:
    """What became of the trials of a strategy."""

    strategy: str
    whole_top1: float
    changes: list[list[int]] = field(default_factory=list)
    stopped: int = 0
    killed: int = 0
    from_step_0: int = 0
    too_late: int = 0
    top1: list[float] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def break_off(attempt: Attempt, folder: Path, ranks: int, kill: bool, moment_s: float) -> tuple[str, Any]:
    """Stops a run, or kills all its processes, some time after there are ranks; gives how it ended."""
    attempt.wait_for_ranks(ranks)
    time.sleep(moment_s)
    for pid in [attempt.process.pid, *attempt.ranks()] if kill else [attempt.process.pid]:
        with suppress(ProcessLookupError):
            os.kill(int(pid or 0), signal.SIGKILL if kill else signal.SIGTERM)
    how, told = attempt.end()
    over = finished(folder)
    return (how, told) if over is None else ("done", over)


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the figures of a run that has come to its end."""
    log = folder / "events.jsonl"
    last = (read_events(log) if log.exists() else [])[-1:]
    ended = [event for event in last if isinstance(event, RunEnded) and event.outcome == "done"]
    return ended[0].result if ended else None


def left_out(folder: Path) -> int:
    """Return how many images of what was left at its beginning the last session did not look at; negative: again."""
    events = read_events(folder / "events.jsonl")
    start = max(number for number, event in enumerate(events) if isinstance(event, RunStarted))
    started = events[start]
    assert isinstance(started, RunStarted)
    sizes = (OPTIONS["batch_size"],) * OPTIONS["epochs"]
    calendar = Calendar(IMAGES, started.workers, sizes, Begun.from_json(started.begun))
    left = sum(calendar.images_left(epoch) for epoch in range(started.start_epoch, started.epochs))
    return left - sum(event.images for event in events[start:] if isinstance(event, WorkerProgress))


def trial(row: Row, seed: int, whole_s: float, folder: Path) -> None:
    """Runs to the end with three changes on the way."""
    draw = random.Random(f"{row.strategy} {seed}")
    options = OPTIONS | {"strategy": row.strategy}
    servers = strategy_from(row.strategy).traits(1).servers
    attempt, workers, how, told = Attempt(folder, options), [WORKERS], "", None
    for _ in range(CHANGES):
        kill = draw.random() < 0.5
        how, told = break_off(attempt, folder, workers[-1] + servers, kill, draw.uniform(0.1, 0.6) * whole_s)
        if finished(folder) is not None:
            row.too_late += 1
            break
        row.killed += kill
        row.stopped += not kill
        row.from_step_0 += not checkpoints(folder / "checkpoints")
        workers.append(draw.choice([each for each in range(1, MOST + 1) if each != workers[-1]]))
        attempt = Attempt(folder, options, resume=True, changed={"workers": workers[-1]})
    else:
        how, told = attempt.end()
    row.changes.append(workers)
    if how != "done":
        row.failures.append(f"seed {seed}, workers {workers}: {how}: {told}")
        print("  FAILED", row.failures[-1], flush=True)
        return
    row.top1.append(told["test_top1"])
    if len(workers) > 1:
        row.left_out.append(left_out(folder))


def row_of(strategy: str, trials: int, folder: Path) -> Row:
    """Tries a strategy."""
    began_s = time.monotonic()
    how, whole = Attempt(folder / "whole", OPTIONS | {"strategy": strategy}).end()
    assert how == "done", whole
    whole_s = time.monotonic() - began_s
    row = Row(strategy, whole["test_top1"])
    for seed in range(trials):
        trial(row, seed, whole_s, folder / f"run{seed}")
    return row


def line(row: Row) -> str:
    """Return a row as Markdown."""
    mean = f"{100 * statistics.mean(row.top1):.1f}" if row.top1 else "–"
    worst = f"{100 * min(row.top1):.1f}" if row.top1 else "–"
    workers = "; ".join(", ".join(map(str, each)) for each in row.changes)
    cells = (f"`{row.strategy}`", workers, row.stopped, row.killed, row.from_step_0)
    found = (sum(map(abs, row.left_out)), f"{100 * row.whole_top1:.1f}", mean, worst, len(row.failures))
    return f"| {' | '.join(map(str, (*cells, *found)))} |"


def main() -> None:
    """Tries all strategies, and writes what became of them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--trials", type=int, default=4)
    options.add_argument("--only", nargs="*", default=None)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    rows: list[Row] = []
    for strategy in chosen.only or STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(strategy, chosen.trials, Path(folder)))
        print(line(rows[-1]), flush=True)
        if chosen.out is not None:
            facts = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__}
            facts |= {"options": OPTIONS, "rows": [vars(row) for row in rows]}
            (chosen.out / "results.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row.failures for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    main()
