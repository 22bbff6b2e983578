"""Uneven machines that go in step: with equal parts of a global batch, and with parts by speed.

    python benchmarks/uneven/in_step.py [--real [--only NAME …] [--batch-size 64] [--epochs 3]]

Simulated, in seconds of virtual time:

- four workers, one of them five times slow, 100 steps of 0.1 s, free links: 12.5 s if all speeds add up;
- two hosts of speed 3 and 1 on 1 Gb/s, ResNet-18 at 64 images a worker: the fast one alone trains 320 images/s, both
  together 427 at best.

`--real` trains on this machine's first two cores besides: worker 1 computes for a third of the time, since another
process stops it (SIGSTOP) and lets it go on (SIGCONT), without control groups. The duty cycle is 6 ms, well below a
step of some 20 ms: a slow machine is slow all the time, where one that stops for 20 ms at once makes the length of a
step a matter of luck. Before and after each row both workers train alone, in two runs at the same time, the slow one
held in the same way: a row's speed is told as a share of their sum. Strategies whose workers draw their batches need no
balance; `ddp` is PyTorch's own. Rows that are repeated replace those before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from drawn import on_two_hosts, simulated

from polyrhythm.events import BatchesBalanced, Evaluated, RunStarted, WorkerProgress
from polyrhythm.reporting.event_log import read_events

HERE = Path(__file__).parent
ONE_SLOW = """
name: one-slow
hosts:
  - {name: fast, count: 3, cores: 8}
  - {name: slow, count: 1, cores: 8, speed: 0.2}
nic: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
step_time: constant(seconds=0.1)
"""
ALL_SPEEDS = 3.2 * 64 / 0.1
"""Images a second."""
STEPS, SLOW = 100, "given(weights=[5, 5, 5, 1])"
IN_STEP = [
    "synchronous",
    "lazy_synchronous",
    "parameter_server(consistency=synchronous, placement=dedicated)",
    "backup_workers(spare=1, placement=dedicated)",
    "local_sgd(steps=5)",
    "ssp(placement=dedicated)",
]
ON_1_GB = [
    ("synchronous", 64),
    ("synchronous(transfer=bfloat16)", 64),
    ("lazy_synchronous", 64),
    ("local_sgd(steps=8)", 64),
    ("synchronous", 256),
]


def played(cluster: str, strategy: str, balance: str, **options) -> dict:
    """Return the figures of a run without gradients."""
    if "dedicated" in strategy:  # a host of its own for the server
        cluster = cluster.replace("nic:", "  - {name: server, count: 1, cores: 8}\nnic:")
    return simulated(cluster, gradients="none", strategy=strategy, balance=balance, **options)


def one_slow() -> list[dict]:
    rows = []
    for strategy in IN_STEP:
        row = {"strategy": strategy}
        for balance in ("off", "measured", SLOW):
            figures = played(
                ONE_SLOW, strategy, balance, workers=4, batch_size=64, steps=STEPS, data="digits", model="mlp"
            )
            row[balance.partition("(")[0]] = round(figures["seconds"], 2)
            if balance == "measured":
                row["sustained, of all speeds"] = round(figures["sustained_images_per_s"] / ALL_SPEEDS, 3)
        rows.append(row)
        print(row, flush=True)
    return rows


def two_hosts() -> list[dict]:
    rows = []
    for strategy, batch in ON_1_GB:
        cluster = on_two_hosts(batch)
        row = {"strategy": strategy, "batch_size": batch}
        for balance in ("off", "measured"):
            figures = played(
                cluster,
                strategy,
                balance,
                workers=2,
                batch_size=batch,
                steps=200,
                data="fashion-mnist",
                model="resnet18",
            )
            row[balance] = round(figures["images_per_s"], 1)
        rows.append(row)
        print(row, flush=True)
    return rows


PERIOD_S, WORKS = 0.006, 1 / 3


def held(process: int, until) -> None:
    """Let a process compute for a third of the time."""
    while until():
        try:
            os.kill(process, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - WORKS))
            os.kill(process, signal.SIGCONT)
            time.sleep(PERIOD_S * WORKS)
        except ProcessLookupError:
            return


DDP = """
import sys
from polyrhythm.api.ddp import train_with_ddp
if __name__ == "__main__":
    out, batch, epochs = sys.argv[1:]
    job = {"model": "lenet5", "batch_size": int(batch), "epochs": int(epochs), "threads": 1}
    train_with_ddp(out, workers=2, keep_checkpoints=0, **job)
"""


def started(
    strategy: str, balance: str, batch: int, budget: list[str], workers: int, run: Path
) -> subprocess.Popen:
    command = ["polyrhythm", "train", "--strategy", strategy, "--workers", str(workers), "--balance", balance]
    command += ["--model", "lenet5", "--batch-size", str(batch), *budget, "--threads", "1"]
    command += ["--out", str(run), "--keep-checkpoints", "0"]
    if strategy == "ddp":  # from a file, since its ranks are spawned
        script = run.parent / "ddp.py"
        script.write_text(DDP)
        command = [sys.executable, str(script), str(run), str(batch), budget[-1]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)


def held_while_it_runs(process: subprocess.Popen, run: Path) -> None:
    """Hold the last worker of a run until the run has ended."""
    events = run / "events.jsonl"
    while not (events.exists() and b"RunStarted" in events.read_bytes()):
        time.sleep(0.05)
    begun = next(event for event in read_events(events) if isinstance(event, RunStarted))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    processes = sorted(int(child) for child in children.read_text().split())
    ranks = processes[-(begun.workers + begun.servers) :]  # any helper of multiprocessing was started before
    held(ranks[begun.workers - 1], lambda: process.poll() is None)  # servers are the last ranks


def images_per_s(run: Path) -> float:
    done = [event for event in read_events(run / "events.jsonl") if isinstance(event, WorkerProgress)]
    return sum(event.images for event in done) / max(event.time_s for event in done)


ALONE = 30_000
"""Images that the slow worker trains by itself; the other three times as many in about the same time."""


def alone(batch: int) -> int:
    """Return the sum of both workers' speeds, each in a run of its own, at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        fast, slow = Path(folder) / "fast", Path(folder) / "slow"
        processes = [
            started("synchronous", "off", batch, ["--updates", str(round(images / batch))], 1, run)
            for run, images in [(fast, 3 * ALONE), (slow, ALONE)]
        ]
        held_while_it_runs(processes[1], slow)
        for process in processes:
            process.communicate()
        return round(images_per_s(fast) + images_per_s(slow))


def trained(strategy: str, balance: str, batch: int, epochs: int) -> dict:
    """Train for real with two workers, the last of which has a third of a core."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        process = started(strategy, balance, batch, ["--epochs", str(epochs)], 2, run)
        held_while_it_runs(process, run)
        process.communicate()
        events = list(read_events(run / "events.jsonl"))
        tested = [event for event in events if isinstance(event, Evaluated)]
        parts = [event.sizes for event in events if isinstance(event, BatchesBalanced)]
        reached = [event.time_s for event in tested if event.test_top1 >= 0.89]
        speed = images_per_s(run)
    return {
        "strategy": strategy,
        "balance": balance,
        "batch_size": batch,
        "parts_at_last": parts[-1] if parts else None,
        "images_per_s": round(speed),
        "seconds_to_0.89": round(reached[0], 1) if reached else None,
        "test_top1": round(tested[-1].test_top1, 4),
    }


REAL = [
    ("synchronous", "off"),
    ("synchronous", "measured"),
    ("backup_workers(spare=1)", "measured"),
    ("local_sgd(steps=8)", "off"),
    ("local_sgd(steps=8)", "measured"),
    ("ssp", "measured"),
    ("parameter_server", "off"),
    ("ad_psgd", "off"),
    ("mixed(replicas=2)", "off"),
    ("ddp", "off"),
]


def real(kept: dict, only: list[str], batch: int, epochs: int, path: Path) -> None:
    """Train for real; each row is written at once, in place of an earlier one of the same name."""
    rows = kept.get("real", [])
    before = alone(batch)
    for strategy, balance in REAL:
        if only and strategy.partition("(")[0] not in only:
            continue
        row = trained(strategy, balance, batch, epochs)
        after = alone(batch)  # the machine's own speed changes by the minute
        both = (before + after) / 2
        row |= {"both_alone_images_per_s": round(both), "of_both": round(row["images_per_s"] / both, 2)}
        same = [each for each in rows if all(each.get(key) == row[key] for key in WHICH)]
        rows = kept["real"] = [*(each for each in rows if each not in same), row]
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print(row, flush=True)
        before = after


WHICH = ("strategy", "balance", "batch_size")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="train on this machine, too")
    parser.add_argument("--only", nargs="*", default=[], help="names of strategies to train")
    parser.add_argument("--batch-size", type=int, default=64, help="of a worker")
    parser.add_argument("--epochs", type=int, default=3)
    asked = parser.parse_args()
    path = HERE / "in_step.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    if not asked.only:
        kept |= {"one_slow_s": one_slow(), "two_hosts_images_per_s": two_hosts()}
        path.write_text(json.dumps(kept, indent=1) + "\n")
    if asked.real:
        real(kept, asked.only, asked.batch_size, asked.epochs, path)


if __name__ == "__main__":
    sys.exit(main())
