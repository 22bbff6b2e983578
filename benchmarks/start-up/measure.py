"""How long a run of two workers takes to its first step, against a process that only imports torch.

    python benchmarks/start-up/measure.py [--rounds 7] [--data fashion-mnist] [--model mlp]

Peer and ours start in turn, each as a new process with warm file caches. Ours is `polyrhythm train --workers 2`, from
the start of its process until its run folder says that training starts: then both workers hold the same parameters and
begin their first step. With `--imports` a last run names the modules whose import takes longest.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

POLL_S = 0.001
GIVE_UP_S = 120.0
NAMED_MODULES = 12


def import_torch_s() -> float:
    """Starts a process that imports torch and ends; gives its seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def first_step_s(words: list[str], folder: Path) -> float:
    """Starts a run, gives the seconds until its first step, and interrupts it."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "polyrhythm", "train", *words, "--out", str(folder), "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        events = folder / "events.jsonl"
        while not (events.exists() and "RunStarted" in events.read_text()):
            if run.poll() is not None or time.perf_counter() - start > GIVE_UP_S:
                run.kill()
                raise SystemExit(run.stderr.read() if run.stderr else "the run did not start")
            time.sleep(POLL_S)
        seconds = time.perf_counter() - start
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=GIVE_UP_S)
    return seconds


def slowest_imports() -> list[tuple[float, str]]:
    """Return the modules outside torch whose own code takes longest to import, with their milliseconds."""
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-c",
        "import torch, polyrhythm.cli.main, polyrhythm.api.train",
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = []
    for line in told.splitlines()[1:]:
        own, _, name = line.removeprefix("import time:").split("|")
        if not name.strip().startswith("torch"):
            found.append((int(own) / 1000, name.strip()))
    return sorted(found, reverse=True)[:NAMED_MODULES]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--data", default="fashion-mnist")
    options.add_argument("--model", default="mlp")
    options.add_argument(
        "--imports", action="store_true", help="name the modules that take longest to import"
    )
    chosen = options.parse_args()
    words = ["--data", chosen.data, "--model", chosen.model, "--strategy", "synchronous", "--workers", "2"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with TemporaryDirectory() as scratch:
        import_torch_s()
        first_step_s(words, Path(scratch, "warm"))
        pairs = [
            (import_torch_s(), first_step_s(words, Path(scratch, str(round_))))
            for round_ in range(chosen.rounds)
        ]
    ratios = [ours / alone for alone, ours in pairs]
    alone_s, ours_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{chosen.model} on {chosen.data}, synchronous, 2 workers, {chosen.rounds} rounds")
    print(f"python, import torch          {alone_s:6.2f} s (median)")
    print(f"polyrhythm, to the first step {ours_s:6.2f} s (median)")
    middle, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"ratio                         {middle:6.2f} (median; {spread})")
    if chosen.imports:
        for milliseconds, name in slowest_imports():
            print(f"  {milliseconds:7.1f} ms  {name}")


if __name__ == "__main__":
    main()
