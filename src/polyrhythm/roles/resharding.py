"""Resuming with another number of workers than a checkpoint was written by.

Where workers go in step, hold the same parameters, and no server keeps a count of them, a checkpoint of a whole epoch
serves any number of workers: all get worker 0's parameters and optimiser; those who were there keep their batch-norm
statistics, and others get worker 0's. Steps are counted anew, since an epoch has more or fewer of them.
"""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job
from polyrhythm.roles.snapshot import Snapshot


def can_reshard(job: Job, before: int) -> bool:
    """Whether the job's strategy lets a run go on that had so many workers before."""
    strategy = job.strategy
    return not strategy.server_count and all(strategy.agrees(workers) for workers in (before, job.workers))


def resharded(snapshot: Snapshot, job: Job, before: int) -> Snapshot:
    """Gives a checkpoint as if the job's number of workers had written it.

    Args:
        snapshot: written by `before` workers.
        job: that goes on.
        before: how many there were.

    Raises:
        RequestError: it was written in the middle of an epoch, which was dealt out among `before` workers.
    """
    if snapshot.step != replace(job, workers=before).calendar.start(snapshot.epoch):
        raise RequestError(
            f"the run was interrupted in the middle of an epoch that {before} workers share: resume with --workers "
            f"{before} until the epoch is over"
        )
    step = job.calendar.start(snapshot.epoch)
    kept = {
        worker: replace(state, account=replace(state.account, step=step))
        for worker, state in snapshot.workers.items()
        if worker < job.workers
    }
    return replace(snapshot, step=step, workers=kept)


def resharding_notice(job: Job, before: int) -> str:
    """Says what became of the workers' states."""
    more = max(0, job.workers - before)
    new = f"; the {more} new ones also its batch-norm statistics" if more else ""
    left = max(0, before - job.workers)
    gone = f"; the batch-norm statistics of {left} are left out" if left else ""
    return (
        f"resumed with {job.workers} workers in place of {before}: all go on from worker 0's parameters and "
        f"optimiser{new}{gone}; a step now has {job.workers * job.learning.batch_size} images"
    )
