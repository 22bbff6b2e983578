"""Uneven machines that go in step: with equal parts of a global batch, and with parts by speed.

    python benchmarks/uneven/in_step.py [--real [--only NAME …] [--batch-size 64] [--epochs 3]]

Simulated, in seconds of virtual time:

- four workers, one of them five times slow, 100 steps of 0.1 s, free links: 12.5 s if all speeds add up;
- two hosts of speed 3 and 1 on 1 Gb/s, ResNet-18 at 64 images a worker: the fast one alone trains 320 images/s, both
  together 427 at best.

`--real` trains on this machine's first two cores besides, one for each worker; servers share that of worker 0. Worker 1
has a third of its core: a program of higher priority (SCHED_FIFO, which needs root) takes the rest, a millisecond at a
time, well below a step of some 20 ms. Stops of the worker's process would stop whatever it has to answer, too, and as
long as a step they make its length a matter of luck.
Before and after each row both workers train alone, in two runs at the same time on the same cores: a row's speed is
told as a share of their sum. Epochs are tested in both, by a test image for six trained. Strategies whose workers draw
their batches need no balance; `ddp` is PyTorch's own. A row that is repeated gets another run, and is told by the
median of all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from drawn import on_two_hosts, simulated

from polyrhythm.data.sources.fashion_mnist import ADDRESS, FILES, SYSTEM_FOLDER, cache_folder, find_or_fetch
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


WORKS, PERIOD_S = 1 / 3, 0.001
TAKER = f"""
import os, sys, time
parent, begun_s = os.getppid(), time.monotonic()
os.sched_setaffinity(0, {{int(sys.argv[1])}})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
taken_s = time.thread_time()
while os.getppid() == parent:
    time.sleep({WORKS * PERIOD_S})
    while time.thread_time() - taken_s < {1 - WORKS} * (time.monotonic() - begun_s):
        pass
"""


def share_of_a_core(core: int) -> subprocess.Popen:
    """Start what leaves a third of a core to others, until it is ended."""
    return subprocess.Popen([sys.executable, "-c", TAKER, str(core)])


DDP = """
import sys
from polyrhythm.api.ddp import train_with_ddp
if __name__ == "__main__":
    out, batch, epochs = sys.argv[1:]
    job = {"model": "lenet5", "batch_size": int(batch), "epochs": int(epochs), "threads": 1}
    train_with_ddp(out, workers=2, keep_checkpoints=0, **job)
"""


def started(
    strategy: str, balance: str, batch: int, epochs: int, workers: int, run: Path, data: str = "fashion-mnist"
) -> subprocess.Popen:
    command = ["polyrhythm", "train", "--strategy", strategy, "--workers", str(workers), "--balance", balance]
    command += ["--model", "lenet5", "--data", data, "--batch-size", str(batch), "--epochs", str(epochs)]
    command += ["--threads", "1", "--out", str(run), "--keep-checkpoints", "0"]
    if strategy == "ddp":  # from a file, since its ranks are spawned
        script = run.parent / "ddp.py"
        script.write_text(DDP)
        command = [sys.executable, str(script), str(run), str(batch), str(epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def ranks_of(process: subprocess.Popen, run: Path) -> tuple[list[int], int]:
    """Return the processes of a run that has begun, servers last, and how many workers it has."""
    events = run / "events.jsonl"
    while not (events.exists() and b"RunStarted" in events.read_bytes()):
        if process.poll() is not None:
            sys.exit(f"ended at once, with status {process.returncode}: {process.args}")
        time.sleep(0.05)
    begun = next(event for event in read_events(events) if isinstance(event, RunStarted))
    ranks = begun.workers + begun.servers
    while (
        len(processes := children_of(process.pid)) < ranks
    ):  # ddp says that it begins before its ranks are there
        time.sleep(0.05)
    return processes[-ranks:], begun.workers  # helpers were started before


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started, but for Python's own trackers."""
    children = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    trackers = b"resource_tracker"
    return sorted(child for child in children if trackers not in Path(f"/proc/{child}/cmdline").read_bytes())


def put(process: int, core: int) -> None:
    """Let all threads of a process run on one core only."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def images_per_s(run: Path) -> float:
    """Return the images trained in a second of the whole run, with its tests."""
    events = list(read_events(run / "events.jsonl"))
    images = sum(event.images for event in events if isinstance(event, WorkerProgress))
    return images / max(event.time_s for event in events if isinstance(event, WorkerProgress | Evaluated))


QUARTER = 4
"""The slow worker alone trains a quarter of the images, the fast one four times as many in about the same time."""


def quarter(folder: Path) -> str:
    """Write the first quarter of the training and the test images to a folder; return it as data for a run."""
    contents = find_or_fetch(SYSTEM_FOLDER, cache_folder() / "fashion-mnist", ADDRESS)
    for file, content in zip(FILES, contents, strict=True):
        head = 4 + 4 * content[3]  # a big-endian number for each dimension
        images = int.from_bytes(content[4:8], "big") // QUARTER
        size = (len(content) - head) // QUARTER
        (folder / file.name).write_bytes(
            content[:4] + images.to_bytes(4, "big") + content[8:head] + content[head : head + size]
        )
    return f"mnist(folder='{folder}')"  # read in the same way, of any length


def alone(batch: int) -> list[float]:
    """Return both workers' speeds, each in a run of its own, at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        runs, data = [Path(folder) / "fast", Path(folder) / "slow"], quarter(Path(folder))
        processes = [
            started("synchronous", "off", batch, epochs, 1, run, data)
            for run, epochs in zip(runs, (QUARTER, 1), strict=True)
        ]
        for core, (process, run) in enumerate(zip(processes, runs, strict=True)):
            put(ranks_of(process, run)[0][0], core)
        taker = share_of_a_core(1)
        for process in processes:
            process.wait()
        taker.kill()
        taker.wait()
        return [images_per_s(run) for run in runs]


def trained(strategy: str, balance: str, batch: int, epochs: int) -> dict:
    """Train for real with two workers, the last of which has a third of a core."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        process = started(strategy, balance, batch, epochs, 2, run)
        ranks, workers = ranks_of(process, run)
        for place, rank in enumerate(ranks):
            put(rank, int(place == workers - 1))
        taker = share_of_a_core(1)
        process.wait()
        taker.kill()
        taker.wait()
        events = list(read_events(run / "events.jsonl"))
        tested = [event for event in events if isinstance(event, Evaluated)]
        parts = [event.sizes for event in events if isinstance(event, BatchesBalanced)]
        reached = [event.time_s for event in tested if event.test_top1 >= 0.89]
        speed = images_per_s(run)
    return {
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
    ("local_sgd(steps=8)", "measured(by=steps)"),
    ("ssp", "measured"),
    ("parameter_server", "off"),
    ("ad_psgd", "off"),
    ("mixed(replicas=2)", "off"),
    ("mixed(replicas=2)", "measured"),
    ("ddp", "off"),
]


def real(kept: dict, only: list[str], batch: int, epochs: int, path: Path) -> None:
    """Train for real; each run is written at once, beside earlier ones of the same row."""
    rows = kept.get("real", [])
    before = alone(batch)
    for strategy, balance in REAL:
        if only and not {strategy.partition("(")[0], f"{strategy}:{balance}"} & set(only):
            continue
        run = trained(strategy, balance, batch, epochs)
        after = alone(batch)  # the machine's own speed changes by the minute
        each = [(first + then) / 2 for first, then in zip(before, after, strict=True)]
        run |= {
            "alone_images_per_s": [round(speed) for speed in each],
            "of_both": round(run["images_per_s"] / sum(each), 3),
        }
        which = {"strategy": strategy, "balance": balance, "batch_size": batch}
        same = [row for row in rows if which.items() <= row.items()]
        runs = [*(run for row in same for run in row["runs"]), run]
        row = {**which, **{f"median_{name}": median(runs, name) for name in MEDIANS}, "runs": runs}
        rows = kept["real"] = [*(each for each in rows if each not in same), row]
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print({**which, **run}, flush=True)
        before = after


MEDIANS = ("images_per_s", "of_both", "seconds_to_0.89", "test_top1")


def median(runs: list[dict], name: str) -> float | None:
    """Return the median of a figure; a time that was not reached counts as the longest."""
    found = statistics.median(math.inf if run[name] is None else run[name] for run in runs)
    return round(found, 4) if math.isfinite(found) else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="train on this machine, too")
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of strategies to train, or strategy:balance"
    )
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
