"""A pipeline of two processes beside `torch.distributed.pipelining`: same network, cut, schedule and batch.

    python benchmarks/pipelines/beside_torch.py [--schedule 1f1b] [--pairs 5] [--steps 12] [--room 150]

One thread a process. Ours and torch's take turns, and the order changes from pair to pair, so that what else runs on
the machine meets both. Reported is the ratio of images a second of each pair: their median, and all of them. Ours is
the whole training loop (loader, schedule of the rate, batch-norm statistics); torch's is its schedule and the
optimizer's step on pictures that are ready. Steps before timing starts: 3. The memory of ours is beside what was said.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.multiprocessing.spawn import spawn

import polyrhythm
from polyrhythm.roles import model_workload

SIDE, CLASSES, BATCH, MICROBATCHES, WARM = 64, 10, 32, 8, 3
CUT = 11
"""Children of the network in the first stage, of about half its arithmetic."""
ROOM = "PIPELINE_ROOM_BYTES"
if ROOM in os.environ:  # workers import this file anew
    model_workload.memory_of = lambda device: int(float(os.environ[ROOM]))
SCHEDULES = {
    "gpipe": ("gpipe", ScheduleGPipe),
    "1f1b": ("one_forward_one_backward", Schedule1F1B),
}


def network() -> nn.Sequential:
    """Makes a network of convolutions with batch normalization, as long as one can cut."""
    layers: list[nn.Module] = []
    widths = (3, 32, 32, 64, 64, 96, 96, 128)
    for number, (before, after) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        if number % 2:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def pictures(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return torch.randn(count, 3, SIDE, SIDE, generator=generator), labels


def ours(schedule: str, steps: int) -> dict[str, Any]:
    """Gives images a second of two processes, and their memory."""
    count = BATCH * (steps + WARM)
    with TemporaryDirectory() as place:
        run = polyrhythm.train(
            data=(pictures(count), pictures(BATCH)),
            model=network(),
            strategy=f"pipeline(microbatches={MICROBATCHES}, schedule={SCHEDULES[schedule][0]}, cut=['{CUT - 1}'])",
            workers=2,
            batch_size=BATCH // 2,
            epochs=1,
            optimizer="sgd(lr=0.01, momentum=0.9)",
            threads=1,
            timings=True,
            keep_checkpoints=0,
            out=Path(place) / "run",
        )
        lines = (Path(place) / "run" / "events.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    timings = [each for each in told if each["event"] == "WorkerTimings" and each["worker"] == 0]
    spans = sorted((start, end) for each in timings for what, start, end in each["spans"] if what == "data")
    # Of worker 0: from the start of one step to that of another, the first few left out.
    seconds = spans[-1][0] - spans[WARM][0]
    return {"images_per_s": BATCH * (len(spans) - 1 - WARM) / seconds, "pipeline": run.figures["pipeline"]}


def _theirs(rank: int, schedule: str, steps: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = network()
    part = model[:CUT] if rank == 0 else model[CUT:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    order = SCHEDULES[schedule][1](stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
    images, labels = pictures(BATCH * (steps + WARM))
    start = 0.0
    for step in range(steps + WARM):
        if step == WARM:
            start = time.perf_counter()
        place = slice(BATCH * step, BATCH * (step + 1))
        optimizer.zero_grad()
        if rank == 0:
            order.step(images[place])
        else:
            losses: list[Tensor] = []
            order.step(target=labels[place], losses=losses)
        optimizer.step()
    if rank == 0:
        Path(out).write_text(str(BATCH * steps / (time.perf_counter() - start)))
    dist.destroy_process_group()


def theirs(schedule: str, steps: int) -> float:
    """Gives images a second of torch's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as place:
        out = str(Path(place) / "rate")
        spawn(_theirs, (schedule, steps, port, out), nprocs=2)
        return float(Path(out).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--room", type=float, help="MB that a worker is told to have, as on a smaller machine"
    )
    given = parser.parse_args()
    if given.room is not None:
        os.environ[ROOM] = str(given.room * 1e6)
    ratios = []
    for pair in range(given.pairs):
        found: dict[str, Any] = {}
        for who in ("ours", "theirs") if pair % 2 else ("theirs", "ours"):
            found[who] = (
                ours(given.schedule, given.steps) if who == "ours" else theirs(given.schedule, given.steps)
            )
        ratios.append(found["ours"]["images_per_s"] / found["theirs"])
        print(
            f"pair {pair + 1}: ours {found['ours']['images_per_s']:.1f}, torch {found['theirs']:.1f} images/s",
            flush=True,
        )
    every = sorted(round(ratio, 2) for ratio in ratios)
    print(f"{given.schedule}: ours / torch, median {statistics.median(ratios):.2f} of {every}")
    told = found["ours"]["pipeline"]
    for rank, (said, measured) in enumerate(zip(told["memory"], told["measured_bytes"], strict=True)):
        print(f"worker {rank}: said {said['most'] / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
