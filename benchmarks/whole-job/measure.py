"""How long does a short job take as a whole, from its command to its result?

    python benchmarks/whole-job/measure.py [--rounds 5] [--images 12000] [--epochs 1] [--data FOLDER]

A LeNet-5 on Fashion-MNIST, 2 workers of one thread, batches of 64: the same network, data and optimizer with DDP and
Accelerate under torchrun, Lightning, Ray Train, as a loop under `polyrhythm run`, and by `polyrhythm train`, in turn.
*Channels last*: as torch's guide has it, and `distribute(…, channels_last=True)`. Ratios are DDP's time to that of
each, in the same round: of wall time, and of processor time over all processes, but for Lightning and Ray, which do not
wait for theirs. `polyrhythm train` tests 10,000 images, the others 2,000. Written to `results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
LIGHTNING, RAY = "with_lightning", "with_ray"
BATCH_SIZE = 64
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PEERS = {
    "torchrun, DDP": [*TORCHRUN, "ddp.py"],
    "torchrun, DDP, channels last": [*TORCHRUN, "ddp.py", "channels_last"],
    "torchrun, Accelerate": [*TORCHRUN, "with_accelerate.py"],
    "Lightning": [LIGHTNING],
    "Ray Train": [RAY],
    "polyrhythm run, own loop": ["polyrhythm", "run", "--workers", "2", "own_loop.py"],
    "polyrhythm run, channels last": ["polyrhythm", "run", "--workers", "2", "own_loop.py", "channels_last"],
    "polyrhythm train": [
        "polyrhythm",
        "train",
        "--workers",
        "2",
        "--threads",
        "1",
        "--batch-size",
        str(BATCH_SIZE),
    ],
}
OPTIONS = [
    "--data",
    "fashion-mnist",
    "--model",
    "lenet5",
    "--optimizer",
    "sgd(lr=0.05, momentum=0.9)",
    "--json",
]
REFERENCE = next(iter(PEERS))


def cpu_s() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def job(command: list[str], arguments: list[str]) -> dict[str, float]:
    """Run a job; return its seconds, processor time and accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        if command[1:2] == ["train"]:
            images, epochs = map(int, arguments)
            steps = epochs * -(-images // (2 * BATCH_SIZE))
            arguments = [*OPTIONS, "--updates", str(steps), "--out", f"{folder}/run"]
        began_s, used_s = time.perf_counter(), cpu_s()
        done = subprocess.run(
            [sys.executable, "-m", *command, *arguments],
            cwd=HERE,
            capture_output=True,
            text=True,
            check=False,
        )
        taken = {"s": time.perf_counter() - began_s, "cpu_s": cpu_s() - used_s}
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr[-3000:]}")
    if command[0] in (LIGHTNING, RAY):
        del taken["cpu_s"]
    by_verb = done.stdout.startswith("{")
    accuracy = json.loads(done.stdout)["test_top1"] if by_verb else float(done.stdout.split()[-1])
    return taken | {"accuracy": accuracy}


def main() -> None:
    """Measure, write the rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=12_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "FASHION_MNIST": str(Path(chosen.data).resolve())}
    arguments = [str(chosen.images), str(chosen.epochs)]
    rounds, load = [], [os.getloadavg()[0]]
    for number in range(chosen.rounds + 1):
        found = {name: job(command, arguments) for name, command in PEERS.items()}
        rounds += [found] if number else []  # the first one fills caches
        load.append(os.getloadavg()[0])
        print(f"round {number}", found, flush=True)
    results = {"images": chosen.images, "epochs": chosen.epochs, "load": load, "rounds": rounds}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(
        "| job | wall time | DDP's to it | processor time | DDP's to it | accuracy |\n|---|---|---|---|---|---|"
    )
    for name in PEERS:
        cells = []
        for key in ("s", "cpu_s"):
            if key not in rounds[0][name]:
                cells += ["–", "–"]
                continue
            ratios = [each[REFERENCE][key] / each[name][key] for each in rounds]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells += [f"{statistics.median(each[name][key] for each in rounds):.1f} s", spread]
        accuracy = statistics.median(each[name]["accuracy"] for each in rounds)
        print(f"| {name} | {' | '.join(cells)} | {accuracy:.3f} |")
    print(f"load {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
