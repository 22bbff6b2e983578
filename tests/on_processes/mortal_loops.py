"""Runs of loops that lose a rank, what they leave, and how an epoch is dealt out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from on_processes import mortal_loop_task as task
from on_processes.forked_script import run_forked


def run(folder: Path, strategy: str, epochs: int, victim: int, *word: str, restarts: int = 3) -> str:
    arguments = [strategy, str(folder), str(epochs), str(victim), *word]
    return run_forked(task.__file__, arguments, folder, workers=task.WORKERS, restarts=restarts)


def diaries(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Gives what each worker has noted of its epochs, by worker."""
    found = {int(path.stem[-1]): json.loads(path.read_text()) for path in folder.glob("worker-*.json")}
    return {worker: told["diary"] for worker, told in sorted(found.items())}


def models(folder: Path) -> list[dict[str, Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("worker-*.pt"))]


def share(place: int, present: int) -> list[list[int]]:
    """Deals an epoch out by hand: a step takes so many points as all have a batch of together."""
    together = present * task.BATCH_SIZE
    order = list(range(task.POINTS))
    return [order[at : at + together][place::present] for at in range(0, task.POINTS, together)]


def divided(place: int) -> list[list[int]]:
    """Return the epoch of one of the first two workers in which the third has failed; see `mortal_loop_task`.

    The last step has all images of the broken step that the failed worker had been dealt, in addition to its own.
    """
    *before, _ = share(place, 3)
    missed = share(2, 3)[task.KILLED_AT]
    images = [*range(task.POINTS - 3 * task.BATCH_SIZE, task.POINTS), *missed]
    assert len(before) == task.KILLED_AT + 1
    return [*before, images[place::2]]


def is_dead(victim: int, place: int, epoch: int, step: int) -> bool:
    """Whether a worker without a successor has died before it took a step."""
    return place == victim and (epoch, step) >= (1, task.KILLED_AT)
