"""Is the memory of each worker of a pipeline what was said before it started?

    python benchmarks/pipelines/memory.py [--strategies SPEC …] [--model vgg11] [--workers 2]

Real processes, two steps each. Measured is the most that was resident in a process beyond what was so when it began (a
forked process has its parent's pages), said is `pipeline.memory` of the run's figures. Worker 0 tests the whole network
besides. No checkpoints are written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import polyrhythm

SIDE, CLASSES = 64, 10
STRATEGIES = (
    "pipeline(microbatches=4, schedule=gpipe)",
    "pipeline(microbatches=4)",
    "pipeline(microbatches=4, recompute=True)",
    "pipeline(microbatches=4, schedule=zero_bubble)",
    "pipeline(microbatches=4, schedule=weight_stashing)",
    "pipeline(microbatches=4, schedule=double_buffered)",
)


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, SIDE, SIDE, generator=generator), torch.arange(count) % CLASSES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--model", default="vgg11")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="of a worker")
    given = parser.parse_args()
    print("| strategy | worker | said, MB | measured, MB | measured / said |\n|---|---|---|---|---|")
    for strategy in given.strategies:
        images = 2 * given.workers * given.batch
        with TemporaryDirectory() as place:
            run = polyrhythm.train(
                data=(pictures(images), pictures(given.workers * given.batch)),
                model=given.model,
                strategy=strategy,
                workers=given.workers,
                batch_size=given.batch,
                epochs=1,
                optimizer="adam",
                threads=1,
                keep_checkpoints=0,
                out=Path(place) / "run",
            )
        told = run.figures["pipeline"]
        for worker, (said, measured) in enumerate(zip(told["memory"], told["measured_bytes"], strict=True)):
            ratio = measured / said["most"]
            print(
                f"| `{strategy}` | {worker} | {said['most'] / 1e6:.0f} | {measured / 1e6:.0f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
