"""A loop of one epoch in which workers are killed, and whose rest is divided again among the others.

    divided_loop_task.py STRATEGY FOLDER [ahead] VICTIM…

Each VICTIM is killed before its step KILLED_AT has gradients. Once its replacement waits, worker 1 takes its time for
each step, until the replacement takes part. Each worker notes its batches, with their weights, after every step. With
`ahead` the loop fetches one batch before the step of the one before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from on_processes.mortal_loop_task import network, optimizer_of

WORKERS, POINTS, BATCH_SIZE, KILLED_AT, WAITS_AT = 3, 476, 4, 5, 8


def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(POINTS, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(1)


def with_weights(shard: Any, *, ahead: bool) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the images of each batch and its weight, as it is when the batch is fetched."""
    fetched: list[tuple[torch.Tensor, float]] = []
    for (indices,) in shard:
        fetched.append((indices, shard.weight))
        if len(fetched) > ahead:
            yield fetched.pop(0)
    yield from fetched


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)


def main(strategy: str, folder: Path, victims: list[int], *, ahead: bool) -> None:
    import polyrhythm
    from polyrhythm.launch.script import WorkerStatus, WorkerStatuses
    from polyrhythm.training.flat_optimizer import make_optimizers_quickly

    make_optimizers_quickly()
    generation = os.environ["POLYRHYTHM_GENERATION"]
    rejoins = generation != "0"
    inside = [folder / f"inside-{victim}" for victim in victims]
    inputs, labels = points()
    with polyrhythm.join(strategy) as group:
        statuses = WorkerStatuses(group._home.rendezvous.store, WORKERS)
        model = network()
        model, optimizer = group.distribute(model, optimizer_of(model))
        loader = DataLoader(TensorDataset(torch.arange(POINTS)), BATCH_SIZE, shuffle=True)
        shard = group.shard(loader)
        scheduler = schedule_of(optimizer, len(shard))
        notes = (folder / f"steps-{group.rank}-{generation}.jsonl").open("w")
        for _ in group.epochs(1, scheduler):
            for indices, weight in with_weights(shard, ahead=ahead):
                step = optimizer.steps
                if rejoins:
                    (folder / f"inside-{group.rank}").touch()
                elif group.rank in victims and step == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                elif group.rank == 1 and step == WAITS_AT:
                    while any(statuses.of(victim) is WorkerStatus.COMING for victim in victims):
                        time.sleep(0.01)
                elif group.rank == 1 and step > WAITS_AT and not all(map(Path.exists, inside)):
                    time.sleep(0.1)
                functional.cross_entropy(model(inputs[indices]), labels[indices]).backward()
                optimizer.step()
                scheduler.step()
                note = {"step": step, "seen": indices.tolist(), "weight": weight, "of": group.workers}
                notes.write(json.dumps(note) + "\n")
                notes.flush()
            mean = group.average(group.rank)
        print(json.dumps({"mean": mean, "length": len(shard)}), file=notes)
    torch.save(model.state_dict(), folder / f"model-{group.rank}.pt")


if __name__ == "__main__":
    more = sys.argv[3:]
    main(
        sys.argv[1], Path(sys.argv[2]), [int(each) for each in more if each != "ahead"], ahead="ahead" in more
    )
