"""Runs that are resumed with another number of workers."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from conformance.jobs import blobs, make_job, perceptron, result_of, resumed, uneven
from polyrhythm.data.sharding import epoch_order
from polyrhythm.errors import RequestError
from polyrhythm.events import Notice, RunStarted, WorkerProgress
from polyrhythm.roles.archive import Archive
from polyrhythm.simulation.run import Surroundings, simulate

IMAGES, BATCH_SIZE = 53, 4


def job_of(workers, folder, spec="synchronous", epochs=2, **options):
    return make_job(
        spec,
        workers,
        dataset=blobs(IMAGES),
        batch_size=BATCH_SIZE,
        folder=folder,
        epochs=epochs,
        model=perceptron,
        **options,
    )


def plain(job, parts):
    """Trains in plain torch; `parts` are pairs of workers that there are, and the images seen when they end."""
    learning, data = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    seen = 0
    for workers, until in parts:
        while seen < until:
            epoch, start = divmod(seen, IMAGES)
            batch = epoch_order(IMAGES, epoch, learning.seed)[start:][: workers * BATCH_SIZE]
            optimizer.zero_grad()
            functional.cross_entropy(model(data.images(batch)), data.labels[batch]).backward()
            optimizer.step()
            seen += len(batch)
    assert seen == parts[-1][1]
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def run(job, surroundings=None):
    """Runs a job; gives its events, and worker 0's parameters in the end."""
    models = []

    def make():
        models.append(perceptron())
        return models[-1]

    events = simulate(replace(job, make_model=make), surroundings)
    return events, torch.cat([value.detach().flatten() for value in models[0].parameters()])


def notices(events):
    return [event.text for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_with_more_or_fewer_workers(tmp_path, before, after):
    schedule = {"schedule": "constant"}
    simulate(job_of(before, tmp_path, epochs=1, **schedule))
    job = resumed(job_of(after, tmp_path, epochs=3, **schedule))
    events, vector = run(job)
    assert torch.allclose(vector, plain(job, [(before, IMAGES), (after, 3 * IMAGES)]), atol=1e-5)
    result = result_of(events)
    assert (result["steps"], result["epochs"]) == (job.calendar.total_steps, 3)
    (notice,) = notices(events)
    assert notice.startswith(
        f"resumed with {after} workers in place of {before}: all go on from worker 0's parameters"
    )
    assert Archive(job).load().step == job.calendar.total_steps  # and not an older one with a higher number


@pytest.mark.parametrize(
    "chain",
    [
        [(2, 0.02), (3, None)],
        [(3, 0.035), (2, None)],
        [(3, 0.02), (1, 0.03), (2, None)],  # three times in one epoch
        [(2, 0.035), (3, 0.02), (1, 0.05), (4, None)],
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0)", "sgd(lr=0.1, momentum=0.9)"])
def test_in_the_middle_of_an_epoch_what_is_left_is_dealt_out_anew(tmp_path, chain, optimizer):
    options = {"schedule": "constant", "optimizer": optimizer}
    parts = []
    for number, (workers, stop_s) in enumerate(chain):
        job = job_of(workers, tmp_path, **options)
        events, vector = run(resumed(job) if number else job, Surroundings(step_s=uneven, stop_at_s=stop_s))
        assert events[-1].outcome == ("done" if stop_s is None else "interrupted")
        if number:
            (notice,) = notices(events)
            left = (-parts[-1][1]) % IMAGES
            assert (
                f"; the {left} images that are left of epoch {parts[-1][1] // IMAGES + 1} are dealt" in notice
            )
            assert notice.endswith(f"; a step now has {workers * BATCH_SIZE} images")
        snapshot = Archive(job).load()
        going = job.going_on(snapshot.begun)
        left = sum(
            going.calendar.images(step, worker)
            for worker in range(workers)
            for step in range(snapshot.step, going.calendar.total_steps)
        )
        parts.append((workers, 2 * IMAGES - left))
    assert torch.allclose(vector, plain(job, parts), atol=1e-5)
    assert len({until for _, until in parts}) == len(parts)  # every part has done something
    assert result_of(events)["epochs"] == 2
    assert result_of(events)["images_not_seen"] == 0


def test_in_the_middle_of_an_epoch_a_run_is_resumed_bit_for_bit_by_as_many(tmp_path):
    """What other workers did of the epoch is known to those who resume it once more as well."""
    options = {"schedule": "cosine", "optimizer": "sgd(momentum=0.9)"}
    simulate(job_of(3, tmp_path / "a", **options), Surroundings(step_s=uneven, stop_at_s=0.02))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    _, whole = run(resumed(job_of(2, tmp_path / "a", **options)))
    events, _ = run(resumed(job_of(2, tmp_path / "b", **options)), Surroundings(stop_at_s=0.015))
    assert events[-1].outcome == "interrupted"
    events, vector = run(resumed(job_of(2, tmp_path / "b", **options)))
    assert torch.equal(vector, whole)
    assert notices(events) == []


@pytest.mark.parametrize("schedule", ["cosine(warmup_epochs=1.5)", "step(at=[0.5])"])
def test_schedules_follow_the_images_that_were_seen(tmp_path, schedule):
    """Warm-up of half the run, and a rate that falls after an epoch, hold wherever the number of workers changes."""
    events = simulate(job_of(3, tmp_path, schedule=schedule), Surroundings(step_s=uneven, stop_at_s=0.03))
    done = result_of(events)["steps"]
    job = job_of(2, tmp_path, schedule=schedule)
    events = simulate(resumed(job), Surroundings(step_s=uneven))
    usual = job.length
    rates = {
        event.step: event.learning_rate
        for event in events
        if isinstance(event, WorkerProgress) and event.worker == 0
    }
    assert rates
    for step, rate in rates.items():
        assert rate == pytest.approx(
            job.learning.optimizer.lr * job.learning.schedule.factor(step - 1, usual)
        )
    started = next(event for event in events if isinstance(event, RunStarted))
    seen = done * 3 * BATCH_SIZE
    assert started.start_step - 1 <= seen / (2 * BATCH_SIZE) <= started.start_step + 1


def test_layers_that_were_cut_are_not_cut_anew(tmp_path):
    simulate(job_of(2, tmp_path, "hybrid", epochs=1))
    with pytest.raises(
        RequestError, match=r"^hybrid goes on with as many workers as it had: resume with --workers 2"
    ):
        Archive(resumed(job_of(3, tmp_path, "hybrid"))).load()
