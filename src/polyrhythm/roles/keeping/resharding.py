"""Resuming with another number of workers than a checkpoint was written by, at any step of an epoch.

    checkpoint      3 workers, in the middle of epoch 2 ─▶ steps that count (the strategy says which)
    what is left    of epoch 2, image by image          ─▶ dealt out among 5 (`data/dealing/begun.py`)
    state           parameters, optimisers, servers     ─▶ merged (the strategy says how)

Steps are counted anew, as `Calendar` does. Those who were there keep their batch-norm statistics, and others get worker
0's.
"""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.data.dealing.begun import Begun
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.snapshot import Snapshot
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.strategies.resharding import Held, Merged


def resharded(snapshot: Snapshot, job: Job, before: int) -> tuple[Snapshot, str]:
    """Gives a checkpoint as if the job's number of workers had written it, and what is to be said of that.

    Args:
        snapshot: written by `before` workers.
        job: that goes on.
        before: how many there were.

    Raises:
        RequestError: the strategy needs as many workers as it had.
    """
    rule = job.strategy.resharding(before, job.workers)
    old = replace(job, workers=before, begun=snapshot.begun)
    states = snapshot.workers
    parts = {index: (state.part, state.part_facts) for index, state in states.items()}
    reached = tuple(states[index].account.step if index in states else 0 for index in range(before))
    held = Held(snapshot.parameters, reached, parts, snapshot.servers)
    steps = rule.counted(held)
    left_out = snapshot.begun.left_out + _images_left_out(old, held)
    begun = Begun(old.calendar.begun_with(steps), left_out)
    new = job.going_on(begun)
    first = min(begun.epochs, default=old.calendar.epoch_of(min(steps)))
    step = new.calendar.start(first)
    merged = rule.merged(held, job.workers, step)
    found = replace(
        snapshot,
        epoch=new.calendar.epoch_of(step),
        step=step,
        parameters=merged.held.parameters,
        workers={index: _state(index, step, states, merged) for index in range(job.workers)},
        servers=merged.held.servers,
        begun=begun,
    )
    return found, _notice(new, before, merged, first, buffers=bool(states[0].buffers))


def _state(index: int, step: int, states: dict[int, WorkerState], merged: Merged) -> WorkerState:
    own = states.get(index, states[0])
    counted = own.account.staleness if index in states else {}
    account = replace(own.account, worker=index, step=step, staleness=counted, stopped=False, final=False)
    part, facts = merged.held.workers.get(index, ({}, {}))
    return replace(own, account=account, part=part, part_facts=facts)


def _images_left_out(job: Job, held: Held) -> int:
    """Counts the images of steps that count as done and of which servers applied no gradient."""
    images = sum(
        job.calendar.images(step, int(pusher))
        for _, facts in held.servers
        for pusher, stretches in facts.get("left_out", {}).items()
        for first, after in stretches
        for step in range(first, min(after, job.calendar.total_steps))
    )
    return round(images / max(1, len(held.servers)))


def _notice(job: Job, before: int, merged: Merged, first: int, *, buffers: bool) -> str:
    """Says what became of the workers' states, and of the epoch."""
    more, gone = max(0, job.workers - before), max(0, before - job.workers)
    new = f"; of batch-norm statistics, {more} new ones have worker 0's" if more and buffers else ""
    left = f"; the batch-norm statistics of {gone} are left out" if gone and buffers else ""
    dealt = ""
    if job.begun.epochs:
        images = sum(job.calendar.images_left(epoch) for epoch in job.begun.epochs)
        of = (
            f"epoch {first + 1}"
            if len(job.begun.epochs) == 1
            else f"epochs {first + 1} to {max(job.begun.epochs) + 1}"
        )
        dealt = f"; the {images} images that are left of {of} are dealt out among them"
    size = job.calendar.batch_size(first)
    return (
        f"resumed with {job.workers} workers in place of {before}: {merged.text}{new}{left}{dealt}; a step now has "
        f"{job.workers * size} images"
    )
