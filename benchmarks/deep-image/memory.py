"""Peak memory of every rank that trains the paper's network of 212.7 million weights by `hybrid`.

    python benchmarks/deep-image/memory.py [--strategy hybrid] [--workers 4] [--model deep_image] [--checkpoints 0]

Real processes, two steps of one image per rank at 224 pixels, momentum, and a test. Measured is the most memory of each
process in samples of 10 ms, with messages in shared memory and without files; about 170 MB of it are PyTorch itself.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import polyrhythm

SIDE, CLASSES = 224, 1000
PERIOD_S = 0.01


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, SIDE, SIDE, generator=generator), torch.arange(count) % CLASSES


def resident(process: int) -> int:
    """Return the bytes of memory of a process, without files; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def children(process: int) -> list[int]:
    """Return all descendants of a process, in the order of their start."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            own = (thread / "children").read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in map(int, own):
            found += [child, *children(child)]
    return sorted(found)


class Peaks(threading.Thread):
    """Follows the memory of all descendants of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.taken: dict[int, int] = {}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(PERIOD_S):
            for child in children(os.getpid()):
                self.taken[child] = max(self.taken.get(child, 0), resident(child))

    def stop(self) -> None:
        self._done.set()
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="hybrid")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--model", default="deep_image")
    parser.add_argument("--checkpoints", type=int, default=0)
    given = parser.parse_args()
    peaks = Peaks()
    peaks.start()
    begun = time.perf_counter()
    with TemporaryDirectory() as place:
        polyrhythm.train(
            data=(images(2 * given.workers), images(1)),
            model=given.model,
            strategy=given.strategy,
            workers=given.workers,
            batch_size=1,
            epochs=1,
            optimizer="sgd(lr=1e-4, momentum=0.9)",
            threads=1,
            keep_checkpoints=given.checkpoints,
            out=Path(place) / "run",
        )
        seconds = time.perf_counter() - begun
    peaks.stop()
    ranks = sorted(sorted(peaks.taken, key=lambda each: -peaks.taken[each])[: given.workers])
    print(
        f"{given.model}, {given.strategy}, {given.workers} ranks, {seconds:.0f} s, load {os.getloadavg()[0]:.1f}"
    )
    print("MB per process:", *(round(peaks.taken[each] / 1e6) for each in ranks))


if __name__ == "__main__":
    main()
