"""Runs of every strategy that go on with more or fewer workers, in the middle of an epoch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import (
    blobs,
    make_job,
    named,
    out_of_step,
    perceptron,
    resumed,
    simulated,
    stop_at,
    strategies,
    strategy,
    uneven,
    with_batch_norm,
)
from polyrhythm.data.dealing import epoch_order, left_of
from polyrhythm.data.seeding import sample_keys
from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Notice, RunStarted
from polyrhythm.roles.checkpointing.archive import FOLDER, Archive
from polyrhythm.roles.job import Job
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.checkpoint import checkpoints

WORKERS, IMAGES, EPOCHS = 3, 53, 2
UNEVEN = ConstantCluster(step_s=uneven)


@pytest.fixture(autouse=True)
def _only_training_looks_at_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report shows the first training pictures as they are augmented: that is no training."""
    monkeypatch.setattr(
        "polyrhythm.roles.leading.training_duties.pictures_json",
        lambda *_: '{"mistakes": [], "augmented": []}',
    )


class Seen:
    """Notes which image is looked at in which epoch, as a transform that changes nothing."""

    def __init__(self, spec: str = "") -> None:
        self.keys: Counter[int] = Counter()
        self._by_all = strategy(spec).traits(WORKERS).pipelines if spec else 0

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        # In a pipeline all workers look at the same.
        self.keys.update(set(keys.tolist()) - self.keys.keys() if self._by_all else keys.tolist())
        return images


def job_of(
    spec: str, workers: int, folder: Path, seen: Seen, model: Callable[[], nn.Module] = perceptron
) -> Job:
    job = make_job(spec, workers, dataset=blobs(IMAGES), folder=folder, epochs=EPOCHS, model=model)
    return replace(job, learning=replace(job.learning, transform=seen))


def keys_of(job: Job, epoch: int, images: Tensor) -> set[int]:
    return set(sample_keys("transform", job.learning.seed, epoch, images).tolist())


def left(job: Job) -> Counter[int]:
    """Gives the keys of the images that a job's workers are to see, as its checkpoint has it."""
    snapshot = Archive(job).load()
    found: Counter[int] = Counter()
    for epoch in range(snapshot.epoch, EPOCHS):
        order = epoch_order(IMAGES, epoch, job.learning.seed)
        stretches = snapshot.begun.epochs.get(epoch, ())
        found.update(keys_of(job, epoch, left_of(order, stretches, job.learning.batch_size)))
    return found


def allowed(spec: str, workers: int) -> bool:
    try:
        strategy(spec).check(workers)
    except RequestError:
        return False
    return True


@pytest.mark.parametrize(
    ("spec", "after", "stop_s"),
    [(spec, *((2, 0.031), (4, 0.075))[number % 2]) for number, spec in enumerate(strategies())],
)
def test_a_run_goes_on_with_others_and_sees_what_is_left_once(
    spec: str, after: int, stop_s: float, tmp_path: Path
) -> None:
    if not allowed(spec, after):
        return
    first, second = Seen(spec), Seen(spec)
    job = job_of(spec, WORKERS, tmp_path, first, with_batch_norm)
    if simulated(job, stop_at(stop_s)).events[-1].outcome == "done":
        return
    going = resumed(job_of(spec, after, tmp_path, second, with_batch_norm))
    expected = left(going)
    found = simulated(going, UNEVEN)
    result = found.result
    assert found.events[-1].outcome == "done"
    assert all(math.isfinite(result[name]) for name in ("train_loss", "test_loss"))
    assert (result["epochs"], result["workers"]) == (EPOCHS, after)
    every = {key for epoch in range(EPOCHS) for key in keys_of(job, epoch, torch.arange(IMAGES))}
    if strategy(spec).traits(WORKERS).skips_steps:  # whoever is late leaves batches out
        assert second.keys <= expected
    else:
        assert second.keys == expected
        assert result["images_not_seen"] == 0
        assert first.keys.keys() | second.keys.keys() == every
    text = next(
        event.text for event in found.events if isinstance(event, Notice) and "in place of" in event.text
    )
    assert text.startswith(f"resumed with {after} workers in place of {WORKERS}: ")
    assert text.endswith(f"; a step now has {4 * after} images")


@pytest.mark.parametrize("spec", named(strategies()))
def test_the_number_changes_twice_in_an_epoch(spec: str, tmp_path: Path) -> None:
    others = next(workers for workers in (4, 2, 6) if allowed(spec, workers))
    simulated(job_of(spec, WORKERS, tmp_path, Seen()), stop_at(0.011))
    simulated(resumed(job_of(spec, others, tmp_path, Seen())), stop_at(0.011))
    seen = Seen(spec)
    going = resumed(job_of(spec, WORKERS, tmp_path, seen))
    expected = left(going)
    found = simulated(going, UNEVEN)
    assert found.events[-1].outcome == "done"
    assert math.isfinite(found.result["test_loss"])
    started = next(event for event in found.events if isinstance(event, RunStarted))
    assert started.steps == going.calendar.total_steps
    if strategy(spec).traits(WORKERS).skips_steps:
        assert seen.keys <= expected
    else:
        assert seen.keys == expected


@pytest.mark.parametrize(
    ("spec", "leader_s"),
    [(spec, (0.004, 0.03)[number % 2]) for number, spec in enumerate(out_of_step(WORKERS))],
)
def test_out_of_step_others_go_on_from_a_checkpoint_that_a_killed_run_left(
    spec: str, leader_s: float, tmp_path: Path
) -> None:
    """Worker 0 was far ahead of the others at the end of its epoch, or far behind them."""
    first = Seen()
    around = ConstantCluster(step_s=lambda worker: leader_s if worker == 0 else 0.01 + 0.004 * worker)
    simulated(job_of(spec, WORKERS, tmp_path, first), around)
    checkpoints(tmp_path / FOLDER)[0].unlink()  # the one at the end of the run
    second = Seen()
    going = resumed(job_of(spec, 4, tmp_path, second))
    snapshot, expected = Archive(going).load(), left(going)
    found = simulated(going, UNEVEN)
    assert found.events[-1].outcome == "done"
    assert [event.epoch for event in found.events if isinstance(event, Evaluated)] == [
        epoch + 1 for epoch in range(snapshot.epoch, EPOCHS)
    ] or snapshot.epoch == EPOCHS
    if strategy(spec).traits(WORKERS).skips_steps:
        assert second.keys <= expected
    else:
        assert second.keys == expected
        assert found.result["images_not_seen"] == 0
