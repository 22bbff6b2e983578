"""How long reports take: of one run of 100,000 events, and of comparisons of 100 runs.

    python benchmarks/reports/measure.py [--runs 100] [--events 100000] [--each 1000]

Logs are made up: progress of four workers, losses that fall, a test an epoch. Times are those of this process's
processor, which other work on the machine hardly changes; the best of three. A run that has ended well has a summary
beside its log (`summary.json`), a run that was killed has none, and its log is read. The long runs that are compared
are one run in as many folders.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from polyrhythm.reporting.comparison import Comparison, read_run
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.reporting.pages.several_runs import render_comparison

WORKERS, TESTS = 4, 50


def make(folder: Path, seed: int, events: int) -> None:
    """Writes the log of a run of so many events."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"strategy: parameter_server\nworkers: {WORKERS}\nseed: {seed}\n")
    drawn = random.Random(seed)
    each = events // TESTS
    start: dict[str, Any] = {"strategy": "parameter_server", "data": "d", "model": "m", "workers": WORKERS}
    start |= {"servers": 1, "epochs": TESTS, "steps_per_epoch": each // WORKERS}
    with (folder / "events.jsonl").open("w", encoding="utf-8") as log:

        def tell(kind: str, time_s: float, **facts: Any) -> None:
            log.write(json.dumps({"event": kind, "time_s": time_s, **facts}) + "\n")

        tell("RunStarted", 0.0, **start)
        for number in range(events):
            now, epoch = number / 100, number // each
            if number % each == each - 1:
                top1 = 1 - 0.9 / (1 + epoch)
                tell(
                    "Evaluated",
                    now,
                    epoch=epoch + 1,
                    test_loss=1 / (1 + epoch),
                    test_top1=top1,
                    test_top5=1.0,
                )
                continue
            progress = {"worker": number % WORKERS, "epoch": epoch, "step": number // WORKERS + 1, "steps": 1}
            progress |= {"images": 32, "loss": 2.3 / (1 + number / events) + drawn.gauss(0, 0.1)}
            tell("WorkerProgress", now, **progress, learning_rate=0.1, wait_s=0.001)
        tell("RunEnded", events / 100, outcome="done", result={"images_per_s": 3200.0, "test_top1": 0.9})


def processor_s(work: Callable[[], object]) -> float:
    """Gives the processor's seconds of some work, the best of three."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--runs", type=int, default=100)
    options.add_argument("--events", type=int, default=100_000)
    options.add_argument("--each", type=int, default=1000)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        make(root / "long", 0, chosen.events)
        size = (root / "long" / "events.jsonl").stat().st_size
        print(f"report of one run of {chosen.events:,} events ({size / 1e6:.1f} MB): ", end="", flush=True)
        print(f"{processor_s(lambda: write_report(root / 'long')):.2f} s")
        short = [root / "short" / str(seed) for seed in range(chosen.runs)]
        for seed, folder in enumerate(short):
            make(folder, seed, chosen.each)
        long = [root / "many" / str(seed) for seed in range(chosen.runs)]
        for seed, folder in enumerate(long):
            shutil.copytree(root / "long", folder, copy_function=os.link)
            (folder / "config.yaml").unlink()
            (folder / "config.yaml").write_text(
                f"strategy: parameter_server\nworkers: {WORKERS}\nseed: {seed}\n"
            )

        def compare(folders: Sequence[Path]) -> str:
            return render_comparison(Comparison.of([read_run(folder) for folder in folders]), root, "")

        for what, folders, each in (
            ("killed runs", short, chosen.each),
            ("runs that ended well", long, chosen.events),
        ):
            taken = processor_s(partial(compare, folders))
            print(f"comparison of {chosen.runs} {what}, of {each:,} events each: {taken:.2f} s", flush=True)


if __name__ == "__main__":
    main()
