"""Kill -9 at random moments of a checkpointing run, then `--resume`: does it always work, and to the same bits?

    python benchmarks/resume-anywhere/resume_anywhere.py [--moments 50] [--only NAME …] [--out DIR]
    python benchmarks/resume-anywhere/saving.py          # while a run saves and tests

Real processes: `mlp` on `digits`, 3 workers, a checkpoint every epoch. At each moment, drawn evenly from the time in
which its ranks live, one process is killed: a worker, a server or the launcher, each as likely. A run that ended by it
is resumed, and once in three killed a second time on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share
from attempt import Attempt, prepare
from polyrhythm.config.assemble import strategy_from
from polyrhythm.events import RunEnded
from polyrhythm.reporting.event_log import read_events
from polyrhythm.training.checkpoint import checkpoints

WORKERS = 3
SAME_BITS = (
    "synchronous",
    "parameter_server(servers=2, consistency=synchronous)",
    "local_sgd",
    "d_psgd",
)
"""Strategies of which 50 moments are tried, all in step: a resumed run must have the bits of one never killed."""

MORE = ("lazy_synchronous", "slowmo", "sgp", "easgd(mode=synchronous, tau=1, servers=2)", "hierarchical")
FREE = ("parameter_server(servers=2)", "ssp", "easgd", "ad_psgd", "hogwild")
OPTIONS: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "workers": WORKERS,
    "epochs": 8,
    "batch_size": 16,
    "restarts": 0,
}
_SECOND_KILL = 3


@dataclass
class Row:
    """What became of the moments of a strategy."""

    strategy: str
    in_step: bool
    whole_s: float
    moments: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    over_before: int = 0
    went_on: int = 0
    resumed: int = 0
    from_step_0: int = 0
    same_bits: int = 0
    failures: list[str] = field(default_factory=list)


def kill_at(attempt: Attempt, moment_s: float, draw: random.Random, names: list[str]) -> str:
    """Kills a process so long after there are ranks; gives whose, or nothing if the run was over."""
    attempt.wait_for_ranks(len(names))
    time.sleep(moment_s)
    processes = [*attempt.ranks(), attempt.process.pid]
    victim = draw.choice(processes)
    if not attempt.process.is_alive():
        return ""
    assert victim is not None
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return "launcher" if victim == attempt.process.pid else names[processes.index(victim)]


def result_of(folder: Path) -> dict[str, Any] | None:
    """Return the figures that a run ended with, if it did."""
    log = folder / "events.jsonl"
    events = read_events(log) if log.exists() else []
    ended = isinstance(events[-1], RunEnded) if events else False
    return events[-1].to_json()["result"] if ended and events[-1].to_json()["outcome"] == "done" else None


def try_moment(row: Row, whole: dict[str, Any], seed: int, folder: Path) -> None:
    """Kills a run once or twice, and resumes it to its end."""
    draw = random.Random(f"{row.strategy} {seed}")
    options = OPTIONS | {"strategy": row.strategy}
    servers = strategy_from(row.strategy).traits(WORKERS).servers
    names = ["worker 0"] + ["worker"] * (WORKERS - 1) + ["server"] * servers
    attempt, killed = Attempt(folder, options), 0
    row.moments += 1
    while True:
        victim = ""
        if killed == 0 or (killed == 1 and draw.randrange(_SECOND_KILL) == 0):
            victim = kill_at(attempt, draw.uniform(0, row.whole_s), draw, names)
            row.kills[victim or "too late"] += 1
        killed += 1
        how, told = attempt.end()
        if how == "killed" and (ended := result_of(folder)) is not None:
            row.over_before += 1  # the launcher died over its report
            how, told = "done", ended
        if how in ("done", "hung"):
            break
        if how == "failed" and "SIGKILL" not in told:
            break
        row.resumed += 1
        has_one = bool(checkpoints(folder / "checkpoints")) if folder.exists() else False
        row.from_step_0 += not has_one
        begun = (folder / "config.yaml").exists()
        attempt = Attempt(folder, options, resume=begun)
        if not begun:
            shutil.rmtree(folder, ignore_errors=True)
    if how != "done":
        row.failures.append(f"seed {seed}: {victim}: {told}")
        print("  FAILED", row.failures[-1], flush=True)
        return
    row.went_on += told["workers_lost"] > 0
    if row.in_step and told["workers_lost"] == 0:
        same = told["parameters_sha256"] == whole["parameters_sha256"]
        row.same_bits += same
        if not same:
            row.failures.append(f"seed {seed}: other bits")
            print("  FAILED", row.failures[-1], flush=True)


def row_of(strategy: str, moments: int, folder: Path) -> Row:
    """Tries all moments of a strategy."""
    options = OPTIONS | {"strategy": strategy}
    lengths_s = []
    for number in range(2):  # the second is warm
        attempt = Attempt(folder / f"whole{number}", options)
        attempt.wait_for_ranks(WORKERS + strategy_from(strategy).traits(WORKERS).servers)
        began_s = time.monotonic()
        how, whole = attempt.end()
        assert how == "done", whole
        lengths_s.append(time.monotonic() - began_s)
    row = Row(strategy, strategy_from(strategy).traits(WORKERS).lockstep, lengths_s[-1])
    for seed in range(moments):
        run = folder / f"run{seed}"
        try_moment(row, whole, seed, run)
        shutil.rmtree(run, ignore_errors=True)
    return row


def line(row: Row) -> str:
    """Return a row as Markdown."""
    kills = ", ".join(f"{count} {victim}" for victim, count in sorted(row.kills.items()))
    exact = f"{row.same_bits} of {row.moments - row.went_on}" if row.in_step else "–"
    cells = (
        f"`{row.strategy}`",
        row.moments,
        kills,
        row.resumed,
        row.from_step_0,
        row.went_on,
        exact,
        len(row.failures),
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Tries all strategies, and writes what became of them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--moments", type=int, default=50)
    options.add_argument("--fewer", type=int, default=15)
    options.add_argument("--only", nargs="*", default=None)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    asked = chosen.only or [*SAME_BITS, *MORE, *FREE]
    rows: list[Row] = []
    for strategy in asked:
        moments = chosen.fewer if strategy in (*MORE, *FREE[1:]) else chosen.moments
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(strategy, moments, Path(folder)))
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
