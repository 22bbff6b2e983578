"""Runs that are resumed with another number of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from conformance.jobs import blobs, make_job, perceptron, result_of, resumed, uneven
from polyrhythm.data.sharding import epoch_order
from polyrhythm.errors import RequestError
from polyrhythm.events import Notice
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


def plain(job, epochs):
    """Trains in plain torch; `epochs` are pairs of workers that there are and the epochs that they end with."""
    learning, data = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    first = 0
    for workers, until in epochs:
        length = replace(job, workers=workers).length
        for epoch in range(first, until):
            order = epoch_order(IMAGES, epoch, learning.seed)
            for step, seen in enumerate(order.split(workers * BATCH_SIZE)):
                number = epoch * length.steps_per_epoch + step
                optimizer.param_groups[0]["lr"] = learning.optimizer.lr * learning.schedule.factor(
                    number, length
                )
                optimizer.zero_grad()
                functional.cross_entropy(model(data.images(seen)), data.labels[seen]).backward()
                optimizer.step()
        first = until
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_with_more_or_fewer_workers(tmp_path, before, after):
    schedule = {"schedule": "constant"}
    simulate(job_of(before, tmp_path, epochs=1, **schedule))
    job = resumed(job_of(after, tmp_path, epochs=3, **schedule))
    models = []

    def make():
        models.append(perceptron())
        return models[-1]

    events = simulate(replace(job, make_model=make))
    vector = torch.cat([value.detach().flatten() for value in models[0].parameters()])
    assert torch.allclose(vector, plain(job, [(before, 1), (after, 3)]), atol=1e-5)
    result = result_of(events)
    assert (result["steps"], result["epochs"]) == (job.calendar.total_steps, 3)
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice.startswith(
        f"resumed with {after} workers in place of {before}: all go on from worker 0's parameters"
    )
    assert Archive(job).load().step == job.calendar.total_steps  # and not an older one with a higher number


def test_in_the_middle_of_an_epoch_the_old_number_is_asked_for(tmp_path):
    events = simulate(job_of(3, tmp_path), Surroundings(step_s=uneven, stop_at_s=0.04))
    assert events[-1].outcome == "interrupted"
    with pytest.raises(
        RequestError, match=r"in the middle of an epoch that 3 workers share: resume with --workers 3"
    ):
        Archive(resumed(job_of(2, tmp_path))).load()


def test_servers_count_their_workers_and_take_no_others(tmp_path):
    simulate(job_of(2, tmp_path, "parameter_server", epochs=1))
    with pytest.raises(RequestError, match="was trained with workers 2, not 3"):
        Archive(resumed(job_of(3, tmp_path, "parameter_server"))).load()
