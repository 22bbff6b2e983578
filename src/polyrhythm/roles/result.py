"""The results of a run, as `train --json` prints them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    # In place: a network that barely fits leaves no memory for a copy.
    return hashlib.sha256(numbers.view(torch.uint8).numpy().data).hexdigest()


def staleness_figures(accounts: list[Account], reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, maximum and histogram of the staleness of all applied gradients.

    With servers, a gradient counts once per shard; without, as the workers counted it.

    Args:
        accounts: accounts of the workers, worker 0's first.
        reports: reports of the servers.
    """
    stated = [report["staleness"] for report in reports] or [account.staleness for account in accounts]
    counted: Counter[int] = Counter()
    for histogram in stated:
        counted.update({int(key): count for key, count in histogram.items()})
    total = sum(counted.values())
    return {
        "mean": sum(key * count for key, count in counted.items()) / total if total else 0.0,
        "max": max(counted, default=0),
        "histogram": {str(key): counted[key] for key in sorted(counted)},
    }


def defense_figures(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum the servers' rejections: messages by reason, gradients shard by shard, workers once per server.

    Args:
        reports: reports of the servers.
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


def traffic_figures(
    accounts: list[Account], reports: list[dict[str, Any]], steps_of_lost: int = 0
) -> dict[str, float]:
    """Return the bytes per step, and those between hosts where some went to ranks of the same host.

    Arguments are those of `bytes_per_step`.
    """
    sent = bytes_per_step(accounts, reports, steps_of_lost)
    own = [replace(account, bytes_sent=account.bytes_inside) for account in accounts]
    inside = bytes_per_step(
        own, [{"bytes_sent": report["bytes_inside"]} for report in reports], steps_of_lost
    )
    between = {"bytes_between_hosts_per_step": sent - inside} if inside else {}
    return {"bytes_sent_per_step": sent, **between}


def bytes_per_step(accounts: list[Account], reports: list[dict[str, Any]], steps_of_lost: int = 0) -> float:
    """Return the bytes that workers and servers sent for the strategy, per worker step of this session.

    Args:
        accounts: accounts of the workers.
        reports: reports of the servers, which have answered failed workers as well.
        steps_of_lost: steps of workers without an account; assumed to have sent as much as the others.
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
        job: finished job.
        steps_done: number of steps of every worker, by its index.
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
        job: finished job.
        roles: roles of the ranks.
        reports: reports of the servers; each covers its shard, and a gradient that one of S servers left out
            counts 1/S.
        images_of: function that returns the images of a worker's step, given the step's number and the
            worker's index.
        most_steps: largest number of steps of a worker.
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
    """Count the training images, over all epochs, of workers that were absent when their groups took a step.

    Args:
        job: finished job.
        roles: roles of the ranks.
        reports: reports of the servers; some servers have kept the groups' lists.
        images_of: see `images_not_applied`.
        most_steps: largest number of steps of a worker.
    """
    if job.faults.regroups_apart and not job.fault_tolerance.rescale:  # others have processed them
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
    """Count the training images of workers in rounds in which they failed or joined.

    Args:
        job: finished job.
        roles: roles of the ranks.
        reports: reports of the servers; some servers have kept the groups' lists.
        images_of: see `images_not_applied`.
        most_steps: largest number of steps of a worker.
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
        job: finished job.
        absences: first step and absent workers of each period, oldest first.
    """
    if not job.fault_tolerance.rescale:  # the others have processed them
        return 0
    ends = [*(step for step, _ in absences[1:]), job.calendar.total_steps]
    return sum(
        job.calendar.images(step, worker)
        for (start, absent), end in zip(absences, ends, strict=True)
        for step in range(start, end)
        for worker in absent
    )


def images_of_lost(job: Job, missed: Sequence[tuple[int, int]], since: Sequence[tuple[int, int]]) -> int:
    """Count the training images of failed workers' steps since the last exchange that the others have merged.

    Args:
        job: finished job.
        missed: number of the others' steps and index of the worker, for each failure.
        since: first and last lost step of each failure.
    """
    rescales = job.fault_tolerance.rescale  # then the others have taken all batches of the step that broke
    steps = {
        (step, worker)
        for (reached, worker), (first, end) in zip(missed, since, strict=True)
        for step in range(first, reached if rescales else min(end, job.calendar.total_steps))
    }
    return sum(job.calendar.images(step, worker) for step, worker in steps)


def train_loss(accounts: list[Account]) -> float:
    """Return the mean training loss of the workers' current epoch."""
    images = sum(account.epoch_images for account in accounts)
    return sum(account.epoch_loss for account in accounts) / images if images else 0.0


MOST_CLASSES_SHOWN = 50
"""Larger confusion matrices are omitted from results."""


def test_figures(found: Evaluation) -> dict[str, Any]:
    """Return the results of a test; with the confusion matrix where it is small enough to read."""
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
