"""The figures of a run, as `train --json` prints them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.evaluation.evaluate import Evaluation
from polyrhythm.roles.checkpointing.worker_state import Account
from polyrhythm.roles.job import Job
from polyrhythm.strategies.role_assignment import RoleAssignment


def digest(vector: Tensor) -> str:
    """Return the sha256 of a vector's values, in hexadecimal digits."""
    numbers = vector.detach().cpu().contiguous()
    # In place: a copy of a network that hardly fits would be one too many.
    return hashlib.sha256(numbers.view(torch.uint8).numpy().data).hexdigest()


def staleness_figures(accounts: list[Account], reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge what the servers counted, one count a gradient and shard; without servers, what worker 0 did.

    Args:
        accounts: the workers', worker 0's first.
        reports: the servers'.
    """
    told = [report["staleness"] for report in reports] or [account.staleness for account in accounts]
    counted: Counter[int] = Counter()
    for histogram in told:
        counted.update({int(key): count for key, count in histogram.items()})
    total = sum(counted.values())
    return {
        "mean": sum(key * count for key, count in counted.items()) / total if total else 0.0,
        "max": max(counted, default=0),
        "histogram": {str(key): counted[key] for key in sorted(counted)},
    }


def defence_figures(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what the servers kept out: messages by reason, gradients shard by shard, workers once a server.

    Args:
        reports: the servers'.
    """
    refused: Counter[str] = Counter()
    for report in reports:
        refused.update(report["refused"])
    return {
        "messages_refused": {reason: refused[reason] for reason in sorted(refused)},
        "gradients_dropped": sum(report["dropped"] for report in reports),
        "gradients_not_finite": sum(report["not_finite"] for report in reports),
        "workers_ejected": sum(report["ejected"] for report in reports),
    }


def bytes_per_step(accounts: list[Account], reports: list[dict[str, Any]], steps_of_lost: int = 0) -> float:
    """Bytes that workers and servers sent for the strategy, for each step of a worker, in this session.

    Args:
        accounts: the workers'.
        reports: the servers', which have answered lost workers as well.
        steps_of_lost: of workers that could hand in no account; taken to have sent as much as the others.
    """
    steps = sum(account.session_steps for account in accounts)
    if not steps:
        return 0.0
    all_steps = steps + steps_of_lost
    sent = sum(account.bytes_sent for account in accounts) * (all_steps / steps)
    return float(sent + sum(report["bytes_sent"] for report in reports)) / all_steps


def images_not_seen(job: Job, steps_done: dict[int, int]) -> int:
    """Count the training images, over all epochs, of steps that were not done.

    Args:
        job: that is over.
        steps_done: of every worker, by its index.
    """
    calendar = job.calendar
    return sum(
        calendar.images(step, worker)
        for worker, done in steps_done.items()
        for step in range(done, calendar.total_steps)
    )


def images_not_applied(
    job: Job,
    roles: RoleAssignment,
    reports: list[dict[str, Any]],
    images_of: Callable[[int, int], int],
    most_steps: int,
) -> int:
    """Count the training images of gradients that servers left out: late, not finite, or never computed to catch up.

    Args:
        job: that is over.
        roles: of its ranks.
        reports: the servers'; each speaks of its shard, and a gradient that one of S left out counts an S-th.
        images_of: the images of a step, given by its number, of a worker, given by its index.
        most_steps: that a worker takes.
    """
    behind = job.traits.pushers(roles)
    images = sum(
        images_of(step, worker)
        for report in reports
        for rank, stretches in report["left_out"].items()
        for first, after in stretches
        for step in range(first, min(after, most_steps))
        for worker in behind[int(rank)]
    )
    return round(images / max(1, job.traits.shards))


def images_of_absent(
    job: Job,
    roles: RoleAssignment,
    reports: list[dict[str, Any]],
    images_of: Callable[[int, int], int],
    most_steps: int,
) -> int:
    """Count the training images, over all epochs, of workers that were not there when their groups took a step.

    Args:
        job: that is over.
        roles: of its ranks.
        reports: the servers', some of which have kept the groups' lists.
        images_of: as in `images_not_applied`.
        most_steps: that a worker takes.
    """
    if job.faults.regroups_apart and not job.fault_tolerance.rescale:  # others have shared them out
        return 0
    return sum(
        images_of(step, roles.workers.index(int(rank)))
        for report in reports
        for rank, stretches in report["absent"].items()
        for first, after in stretches
        for step in range(first, min(after, most_steps))
    )


def images_missed(
    job: Job,
    roles: RoleAssignment,
    reports: list[dict[str, Any]],
    images_of: Callable[[int, int], int],
    most_steps: int,
) -> int:
    """Count the training images of what workers had done, or did, in a round in which they were lost, or came.

    Args:
        job: that is over.
        roles: of its ranks.
        reports: the servers', some of which have kept the groups' lists.
        images_of: as in `images_not_applied`.
        most_steps: that a worker takes.
    """
    absent = {
        (int(rank), step)
        for report in reports
        for rank, stretches in (report["absent"].items() if job.fault_tolerance.rescale else ())
        for first, after in stretches
        for step in range(first, after)
    }  # counted already
    missed = {
        (rank, step)
        for report in reports
        for rank, first, after in report["missed"]
        for step in range(first, min(after, most_steps))
    }
    return sum(images_of(step, roles.workers.index(rank)) for rank, step in missed - absent)


def images_left_out(job: Job, absences: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    """Count the training images, over all epochs, of the shares of workers that did not take part in a step.

    Args:
        job: that is over.
        absences: since which step which workers have taken no part, oldest first.
    """
    if not job.fault_tolerance.rescale:  # the others have shared them out
        return 0
    ends = [*(step for step, _ in absences[1:]), job.calendar.total_steps]
    return sum(
        job.calendar.images(step, worker)
        for (start, absent), end in zip(absences, ends, strict=True)
        for step in range(start, end)
        for worker in absent
    )


def images_of_lost(job: Job, missed: Sequence[tuple[int, int]], since: Sequence[tuple[int, int]]) -> int:
    """Count the training images of the steps of lost workers since the last exchange that the others have merged.

    Args:
        job: that is over.
        missed: after how many steps of the others which workers were missed.
        since: for each of those, the steps, from and to, of which others have nothing.
    """
    rescales = job.fault_tolerance.rescale  # then the others have taken all batches of the step that broke
    steps = {
        (step, worker)
        for (reached, worker), (first, end) in zip(missed, since, strict=True)
        for step in range(first, reached if rescales else min(end, job.calendar.total_steps))
    }
    return sum(job.calendar.images(step, worker) for step, worker in steps)


def train_loss(accounts: list[Account]) -> float:
    """Mean training loss of the epoch that the workers are in."""
    images = sum(account.epoch_images for account in accounts)
    return sum(account.epoch_loss for account in accounts) / images if images else 0.0


MOST_CLASSES_SHOWN = 50
"""Larger confusion matrices are left out of figures."""


def test_figures(found: Evaluation) -> dict[str, Any]:
    """What a test came to; with the confusion matrix where it can be looked at."""
    shown = found.images and len(found.per_class) <= MOST_CLASSES_SHOWN
    return {
        "test_loss": found.loss,
        "test_top1": found.top1,
        "test_top5": found.top5,
        "test_images": found.images,
        "test_top1_interval": list(found.top1_interval),
        "per_class": found.class_figures,
        **({"confusion": found.confusion.tolist()} if shown else {}),
    }
