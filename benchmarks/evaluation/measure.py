"""The gain of tests that run while steps continue, over tests in place: `lenet5`, a test an epoch.

    python benchmarks/evaluation/measure.py [--pairs 3] [--epochs 10] [--images 60000] [--out …/results.json]

Both take turns, with one worker of one thread and a checkpoint every 100 steps. What can be gained is the time of all
tests but the last, after which there is nothing to continue with. Wall seconds count only on a machine without other
work. Forks and copied pages cost seconds of the kernel, which vary less than those of steps: the third share
takes only these to differ. No test is skipped (`--until top1=1`). Pairs that are in the output are not repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from polyrhythm.api.train import prepare_process, train
from polyrhythm.data.dataset import Split
from polyrhythm.data.open import open_data
from polyrhythm.events import Evaluated, Event, RunStarted, WorkerProgress

HOWS = ("in_place", "async")
TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of(pid: int) -> list[float]:
    """Return the wall seconds, and those of a process outside of and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [time.perf_counter(), int(fields[11]) / TICKS, int(fields[12]) / TICKS]


def since(before: list[float], now: list[float]) -> list[float]:
    """Return the differences of each clock."""
    return [late - early for early, late in zip(before, now, strict=True)]


class Watch:
    """Observes one run: the seconds of each clock from its start to its last test, and those of earlier tests."""

    def __init__(self, epochs: int) -> None:
        self._epochs, self._pid = epochs, 0
        self._begun = self._latest = [0.0, 0.0, 0.0]
        self.whole = self.tests = [0.0, 0.0, 0.0]

    def on_event(self, event: Event) -> None:
        """Read the clocks at the start, at reports and at tests."""
        if isinstance(event, RunStarted):
            (worker,) = multiprocessing.active_children()
            assert worker.pid is not None
            self._pid = worker.pid
            self._begun = seconds_of(self._pid)
        elif isinstance(event, WorkerProgress):
            self._latest = seconds_of(self._pid)
        elif isinstance(event, Evaluated) and event.epoch == self._epochs:
            self.whole = since(self._begun, seconds_of(self._pid))
        elif isinstance(event, Evaluated):
            added = since(self._latest, seconds_of(self._pid))
            self.tests = [one + other for one, other in zip(self.tests, added, strict=True)]

    def close(self) -> None:
        """Nothing is open."""


def tensors(split: Split, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first images of a split, and their labels."""
    found = torch.arange(min(images, len(split)))
    return split.images(found), split.labels[found]


def measured(how: str, epochs: int, images: int) -> dict[str, object]:
    """Return the seconds of one run, the digest of its parameters and its last test."""
    dataset = open_data("fashion-mnist")
    watch = Watch(epochs)
    with TemporaryDirectory() as folder:
        run = train(
            out=Path(folder, "run"),
            data=(tensors(dataset.train, images), tensors(dataset.test, len(dataset.test))),
            model="lenet5",
            workers=1,
            threads=1,
            epochs=epochs,
            checkpoint_every="100steps",
            evaluation=how,
            until="top1=1",  # so that no test is skipped
            observers=[watch],
            start_method="fork",
        )
    assert run is not None
    figures = {name: run.figures[name] for name in ("parameters_sha256", "test_top1")}
    return {"whole_s": watch.whole, "tests_s": watch.tests, **figures, "load": os.getloadavg()[0]}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--images", type=int, default=60_000, help="number of training images")
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    chosen = options.parse_args()
    prepare_process()
    head = {
        "epochs": chosen.epochs,
        "images": chosen.images,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    found = json.loads(chosen.out.read_text()) if chosen.out.exists() else {**head, "pairs": []}
    if {key: found[key] for key in head} != head:
        raise SystemExit(f"{chosen.out} has results of {found}: name another --out")
    while len(found["pairs"]) < chosen.pairs:
        order = HOWS if len(found["pairs"]) % 2 == 0 else HOWS[::-1]
        pair = {how: measured(how, chosen.epochs, chosen.images) for how in order}
        found["pairs"].append(pair)
        draft = chosen.out.with_suffix(".partial")
        draft.write_text(json.dumps(found, indent=2) + "\n")
        draft.replace(chosen.out)
    same = all(
        pair["async"][name] == pair["in_place"][name]
        for pair in found["pairs"]
        for name in ("parameters_sha256", "test_top1")
    )
    what = f"lenet5, {chosen.epochs} epochs of {chosen.images:,} images, {len(found['pairs'])} pairs"
    print(f"{what}; same results: {same}")
    rows = [
        (*pair["in_place"]["whole_s"], *pair["async"]["whole_s"], *pair["in_place"]["tests_s"])
        for pair in found["pairs"]
    ]
    columns = [statistics.median(column) for column in zip(*rows, strict=True)]
    print("| seconds (median) | in place | async | tests in place but the last |\n|---|---|---|---|")
    for place, name in enumerate(("wall", "worker 0, outside of the kernel", "worker 0, in the kernel")):
        before, after, tests = columns[place::3]
        print(f"| {name} | {before:.2f} | {after:.2f} | {tests:.2f} |")
    shares = {
        "wall": [(row[0] - row[3]) / row[6] for row in rows],
        "processor": [(row[1] + row[2] - row[4] - row[5]) / (row[7] + row[8]) for row in rows],
        "processor, if only the kernel's differ": [
            1 - (row[5] - row[2] + row[8]) / (row[7] + row[8]) for row in rows
        ],
    }
    parts = ", ".join(f"{name} {100 * statistics.median(share):.0f} %" for name, share in shares.items())
    print(f"\nshare of the possible gain, in seconds (median): {parts}")


if __name__ == "__main__":
    main()
