"""Does a long run with tests and checkpoints during its steps keep its memory, descriptors, threads and folder?

    python benchmarks/soak/flat.py [--steps 20000] [--workers 2] [--out …/flat.json]

`mlp` on `digits`, `synchronous`, a checkpoint every 100 steps and a test of each epoch, both while steps continue. All
processes of the run are looked at twice a second: proportional memory (PSS), descriptors and threads of the launcher
and of all ranks, of tests only their memory; and the run folder, without its log, which grows by every report. Medians
of the eighths of the run show whether anything grows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share
from attempt import Attempt, prepare
from polyrhythm.events import CheckpointSaved, Evaluated, WorkerProgress
from polyrhythm.reporting.event_log import read_events

JOB: dict[str, Any] = {
    "data": "digits",
    "model": "mlp(hidden=[16])",
    "strategy": "synchronous",
    "batch_size": 24,
    "threads": 1,
    "balance": "off",
    "checkpoint_every": "100steps",
    "evaluation": "async",
}
IMAGES = 1437
EVERY_S = 0.5
LONGEST_S = 3600.0
PARTS = 8


def seen_of(pid: int) -> dict[str, float] | None:
    """Return memory, descriptors and threads of a process; None where it has ended."""
    with suppress(OSError, KeyError, StopIteration):  # it ends just now
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {
            "pss_mb": pss / 1024,
            "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(status["Threads"]),
        }
    return None


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process's main thread."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def size_of(folder: Path) -> tuple[int, int]:
    """Return the bytes of a folder without the log, and those of the log."""
    sizes = {}
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                sizes[path.name] = path.stat().st_size
    log = sizes.pop("events.jsonl", 0)
    return sum(sizes.values()), log


def sampled(attempt: Attempt, folder: Path, workers: int) -> list[dict[str, float]]:
    """Return what was seen of a run, until it ends."""
    samples = []
    attempt.wait_for_ranks(workers)
    launcher = attempt.process.pid
    assert launcher is not None
    until_s = time.monotonic() + LONGEST_S
    while attempt.process.is_alive() and time.monotonic() < until_s:
        ranks = attempt.ranks()
        looks = {"launcher": seen_of(launcher)}
        looks |= {f"rank {number}": seen_of(rank) for number, rank in enumerate(ranks[:workers])}
        if len(ranks) >= workers and all(looks.values()):
            sample = {
                f"{who} {what}": value for who, look in looks.items() if look for what, value in look.items()
            }
            tests = [look for pid in children_of(ranks[0]) if (look := seen_of(pid)) is not None]
            sample["tests at once"] = len(tests)
            sample["all pss_mb"] = sum(look["pss_mb"] for look in (*looks.values(), *tests) if look)
            sample["folder_mb"], sample["log_mb"] = (size / 1e6 for size in size_of(folder))
            samples.append(sample)
        time.sleep(EVERY_S)
    return samples


def main() -> None:
    """Run, sample, compare and print."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=20_000)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("flat.json"))
    chosen = options.parse_args()
    per_epoch = -(-IMAGES // (JOB["batch_size"] * chosen.workers))
    job = JOB | {"workers": chosen.workers, "epochs": -(-chosen.steps // per_epoch)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        attempt = Attempt(folder, job)
        samples = sampled(attempt, folder, chosen.workers)
        how, told = attempt.end()
        if how != "done":
            raise SystemExit(f"{how}: {told}\n{Path(name, 'words').read_text()[-2000:]}")
        events = read_events(folder / "events.jsonl")
    settled = samples[len(samples) // 40 :]  # without its start
    edges = [len(settled) * part // PARTS for part in range(PARTS + 1)]
    rows = {
        what: [
            *(
                statistics.median(sample[what] for sample in settled[start:stop])
                for start, stop in pairwise(edges)
            ),
            max(sample[what] for sample in samples),
        ]
        for what in samples[0]
    }
    counts = {
        "steps": max(event.step for event in events if isinstance(event, WorkerProgress)),
        "tests": sum(isinstance(event, Evaluated) for event in events),
        "checkpoints": sum(isinstance(event, CheckpointSaved) for event in events),
        "seconds": told["seconds"],
        "samples": len(samples),
    }
    head = {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0], "options": job}
    chosen.out.write_text(json.dumps({**head, **counts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{value:,.0f} {name}" for name, value in counts.items()))
    print("| | first eighth (median) | second | fifth | last | highest |\n|---|---|---|---|---|---|")
    for what, values in rows.items():
        print(f"| {what} | {' | '.join(f'{values[part]:.2f}' for part in (0, 1, 4, 7, 8))} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    main()
