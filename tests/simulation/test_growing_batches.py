"""Whole runs whose batches grow: against plain torch, resumed, in virtual time, and as the report sees them."""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi

import pytest
import torch
from torch.nn import functional

from conformance.jobs import make_job, resumed, shared_out, simulated, stop_at, strategy, uneven, vector_of
from polyrhythm.data.dealing import epoch_order
from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, RunStarted, WorkerProgress
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.progress import start_line
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.batch_schedules.step import Step
from tolerances import REORDERED

EPOCHS, IMAGES = 4, 53
GROWTH = (1, 1, 2, 4)


def growing(spec, workers=1, **options):
    return make_job(spec, workers, epochs=EPOCHS, batch_schedule=Step(), **options)


def by_hand(job, workers):
    """One model, on batches as large as those of all workers together."""
    train, learning = job.dataset.train, job.learning
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    for epoch, growth in enumerate(GROWTH):
        order = epoch_order(IMAGES, epoch, learning.seed)
        batches = shared_out(order, workers * learning.batch_size * growth)
        for step, indices in enumerate(batches):
            share = (epoch + step / len(batches)) / EPOCHS
            optimizer.param_groups[0]["lr"] = learning.optimizer.lr * (1 + cos(pi * share)) / 2
            optimizer.zero_grad()
            functional.cross_entropy(model(train.images(indices).double()), train.labels[indices]).backward()
            optimizer.step()
    return vector_of(model)


@pytest.mark.parametrize(
    ("spec", "workers"), [("synchronous", 1), ("synchronous", 3), ("local_sgd(steps=3)", 1)]
)
def test_against_plain_torch(spec, workers):
    job = growing(spec, workers, dtype=torch.float64)
    trained = simulated(job, ConstantCluster(step_s=uneven))
    torch.testing.assert_close(vector_of(trained.models[0]), by_hand(job, workers), **REORDERED)
    steps = sum(-(-IMAGES // (4 * workers * growth)) for growth in GROWTH)
    assert trained.result["steps"] == steps
    assert trained.result["epochs"] == EPOCHS
    assert trained.result["images_not_seen"] == 0
    images = sum(event.images for event in trained.events if isinstance(event, WorkerProgress))
    assert images == EPOCHS * IMAGES


@pytest.mark.parametrize("spec", ["synchronous", "local_sgd(steps=3)"])
@pytest.mark.parametrize("stop_s", [0.06, 0.16, 0.24])
def test_a_resumed_run_has_the_same_bits(spec, stop_s, tmp_path):
    job = growing(spec, 3)
    whole = simulated(job, ConstantCluster(step_s=uneven))
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    first = simulated(kept, stop_at(stop_s))
    assert first.events[-1].outcome == "interrupted"
    second = simulated(resumed(kept), ConstantCluster(step_s=uneven))
    assert second.sha256 == whole.sha256
    assert second.result["epochs"] == EPOCHS
    started = second.events[0]
    assert isinstance(started, RunStarted)
    assert started.start_step == job.calendar.start(started.start_epoch)


def test_a_run_is_resumed_with_its_own_batch_schedule(tmp_path):
    job = growing("synchronous", 2, folder=tmp_path)
    simulated(job)
    other = replace(job, learning=replace(job.learning, batch_schedule=Step(growth=4)))
    with pytest.raises(RequestError, match=r"was trained with batch schedule step, not step\(growth=4\)"):
        simulated(resumed(other))


def test_a_step_of_larger_batches_takes_longer():
    events = simulated(growing("synchronous"), ConstantCluster(step_s=lambda worker: 0.01)).events
    tested = [event.time_s for event in events if isinstance(event, Evaluated)]
    lengths = [later - sooner for sooner, later in zip([0.0, *tested], tested, strict=False)]
    assert lengths == pytest.approx([0.14, 0.14, 0.14, 0.16], rel=0.01)  # 14, 14, 7 and 4 steps


def test_asynchronous_workers_take_them_too():
    result = simulated(growing("parameter_server", 3), ConstantCluster(step_s=uneven)).result
    assert result["steps"] == 5 + 5 + 3 + 2
    assert sum(result["staleness"]["histogram"].values()) == 3 * 15


def test_post_local_sgd_takes_its_share_of_the_steps_there_are():
    job = growing("post_local_sgd(after=0.5, steps=2)", 3)
    assert job.calendar.total_steps == 15
    assert strategy("post_local_sgd(after=0.5)").first_local_step(15) == 8
    result = simulated(job).result
    one = simulated(growing("synchronous", 3)).result["bytes_sent_per_step"]
    assert result["bytes_sent_per_step"] == pytest.approx(one * (8 + 3) / 15)


def test_the_report_knows_how_many_steps_there_are():
    events = simulated(growing("synchronous", 3)).events
    assert start_line(events[0]).endswith("4 epochs with 15 steps in all")
    figures = RunFigures()
    for event in events:
        figures.add(event)
    assert figures.steps_per_worker == 15
    assert all(figures.steps_left(series) == 0 for series in figures.workers.values())
