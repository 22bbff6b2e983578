"""What do steps pay for checkpoints that are written during them? `resnet18` at 32 pixels, a checkpoint every 20 steps.

    python benchmarks/evaluation/checkpoints.py [--pairs 40] [--batch-size 32] [--out …/checkpoints.json]

One run with one worker of one thread, in which 20 steps with a checkpoint and 20 without take turns. All seconds are
those of processors, by the kernel's clocks of threads: of the one that takes the steps, and of the one that hashes and
writes. The copy is timed apart, between blocks of steps: the same tensors are copied once more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from polyrhythm.api.train import prepare_process, train
from polyrhythm.roles.checkpointing.archive import Archive, Snapshot
from polyrhythm.roles.leading.state_collector import StateCollector
from polyrhythm.training import checkpoint

EVERY = 20
BLOCK_NAMES = ("without", "with")


class Meter:
    """Times blocks of steps, copies, hashes and writes of the worker that this process becomes.

    Args:
        out: file of the results, a line of JSON each.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._begun: float | None = None
        self._tensors: list[torch.Tensor] = []
        self._due, self._save, self._digest = StateCollector.due, Archive.save, checkpoint._digest

    def attach(self) -> None:
        """Put this meter's methods in the place of the timed ones."""
        meter = self

        def due(collector: StateCollector, done: int, epochs: int) -> bool:
            return meter.boundary(done) if meter._due(collector, done, epochs) else False

        def save(archive: Archive, snapshot: Snapshot) -> str:
            begun = time.thread_time()
            path = meter._save(archive, snapshot)
            meter.note("hash and write", time.thread_time() - begun)
            meter._tensors = list(snapshot.tensors().values())
            return path

        def digest(text: str, tensors: dict[str, torch.Tensor]) -> str:
            begun = time.thread_time()
            value = meter._digest(text, tensors)
            meter.note("hash", time.thread_time() - begun)
            return value

        StateCollector.due, Archive.save, checkpoint._digest = due, save, digest  # type: ignore[method-assign,assignment]

    def boundary(self, done: int) -> bool:
        """End a block of steps; return whether the next one begins with a checkpoint."""
        number, now = done // EVERY, time.thread_time()
        if self._begun is not None and number > 2:
            self.note(BLOCK_NAMES[number % 2], now - self._begun)
        if number % 2 and self._tensors:  # not in a block
            begun = time.thread_time()
            copies = [tensor.clone() for tensor in self._tensors]
            self.note("copy", time.thread_time() - begun)
            self.note("bytes", sum(copy.nbytes for copy in copies))
        self._begun = time.thread_time()
        return number % 2 == 0

    def note(self, what: str, value: float) -> None:
        """Append a measurement to the results."""
        with self._out.open("a", encoding="utf-8") as out:
            out.write(json.dumps([what, value]) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--pairs", type=int, default=40)
    options.add_argument("--batch-size", type=int, default=32)
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("checkpoints.json"))
    chosen = options.parse_args()
    prepare_process()
    images = 2 * EVERY * (chosen.pairs + 2) * chosen.batch_size
    drawn = torch.Generator().manual_seed(0)
    train_images = torch.randn(images, 3, 32, 32, generator=drawn)
    labels = torch.arange(images) % 10
    with TemporaryDirectory() as name:
        lines = Path(name, "lines")
        Meter(lines).attach()
        try:
            train(
                out=Path(name, "run"),
                data=((train_images, labels), (train_images[:64], labels[:64])),
                model="resnet18",
                optimizer="sgd(lr=0.01, momentum=0.9)",
                workers=1,
                threads=1,
                epochs=1,
                batch_size=chosen.batch_size,
                balance="off",
                checkpoint_every=f"{EVERY}steps",
                start_method="fork",
            )
        finally:
            found: dict[str, list[float]] = {}
            for line in lines.read_text().splitlines():
                what, value = json.loads(line)
                found.setdefault(what, []).append(value)
            facts = {"cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()[0]}
            facts |= {"batch_size": chosen.batch_size, "every": EVERY}
            chosen.out.write_text(json.dumps({**facts, **found}, indent=1) + "\n", encoding="utf-8")
    print(report(found))


def report(found: dict[str, list[float]]) -> str:
    """Return the medians, and the seconds of the steps beyond the copy, as Markdown."""
    pairs = list(zip(found["with"], found["without"], strict=False))
    median = {what: statistics.median(values) for what, values in found.items()}
    extra = [one - other - median["copy"] for one, other in pairs]
    share = [100 * each / other for each, (_, other) in zip(extra, pairs, strict=True)]
    error = statistics.stdev(share) / len(share) ** 0.5
    rows: dict[str, Any] = {
        f"{EVERY} steps, without a checkpoint": f"{median['without']:.3f} s",
        f"{EVERY} steps, with one": f"{median['with']:.3f} s",
        f"copy of {median['bytes'] / 1e6:.0f} MB": f"{median['copy']:.3f} s",
        "hash": f"{median['hash']:.3f} s",
        "write": f"{median['hash and write'] - median['hash']:.3f} s",
        f"steps beyond the copy (mean of {len(share)} pairs)": f"{statistics.mean(share):.1f} % ± {error:.1f} %",
        "steps beyond the copy (median)": f"{statistics.median(share):.1f} %",
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


if __name__ == "__main__":
    main()
