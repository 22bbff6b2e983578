"""How long runs are, and what becomes of images that make no full step: against plain torch and counting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import polyrhythm
from conformance.jobs import (
    blobs,
    cosine,
    make_job,
    resumed,
    shared_out,
    simulated,
    stop_at,
    uneven,
    vector_of,
)
from polyrhythm.config.assemble import assemble
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.dealing import epoch_order
from polyrhythm.errors import RequestError
from polyrhythm.events import WorkerProgress
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)
SPECS = [
    "synchronous",
    "parameter_server(consistency=synchronous)",
    "local_sgd(steps=2)",
    "parameter_server",
    "ad_psgd",
]


def images_of(trained) -> int:
    return sum(event.images for event in trained.events if isinstance(event, WorkerProgress))


def job_of(spec: str, workers: int = 3, **learning):
    job = make_job(spec, workers, dtype=torch.float64, dataset=blobs(37, 9), optimizer="sgd(lr=0.1)")
    return replace(job, learning=replace(job.learning, **learning), draws=job.traits.draws)


def by_hand(job, batches_of) -> torch.Tensor:
    """One model, on batches of all workers together."""
    train, learning = job.dataset.train, job.learning
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    batches = [
        batch
        for epoch in range(learning.epochs)
        for batch in batches_of(epoch_order(len(train), epoch, learning.seed))
    ][: learning.updates]
    for step, indices in enumerate(batches):
        optimizer.param_groups[0]["lr"] = cosine(job, step, len(batches))
        optimizer.zero_grad()
        functional.cross_entropy(model(train.images(indices).double()), train.labels[indices]).backward()
        optimizer.step()
    return vector_of(model)


@pytest.mark.parametrize(
    "spec", ["synchronous", "lazy_synchronous", "parameter_server(consistency=synchronous)"]
)
def test_one_image_that_is_left_over_is_no_step_of_its_own(spec):
    job = job_of(spec)  # 37 images in steps of 12 at most: 9, 9, 9 and 10
    trained = simulated(job, UNEVEN)
    expected = by_hand(job, lambda order: shared_out(order, 12))
    torch.testing.assert_close(vector_of(trained.models[0]), expected, **REORDERED)
    assert trained.result["steps"] == 4 * job.learning.epochs


def test_what_makes_no_full_step_is_left_out_on_request():
    job = job_of("synchronous", drop_last=True)
    trained = simulated(job, UNEVEN)
    expected = by_hand(job, lambda order: order[:36].split(12))
    torch.testing.assert_close(vector_of(trained.models[0]), expected, **REORDERED)


@pytest.mark.parametrize("spec", SPECS)
def test_all_batches_are_full_where_the_rest_is_left_out(spec):
    job = job_of(spec, drop_last=True)
    trained = simulated(job, UNEVEN)
    assert images_of(trained) == 36 * job.learning.epochs
    assert trained.result["epochs"] == job.learning.epochs
    assert trained.result["images_not_seen"] == 0


@pytest.mark.parametrize("updates", [2, 5])
def test_a_run_ends_after_its_updates_and_so_does_its_schedule(updates):
    job = job_of("synchronous", updates=updates, epochs=-(-updates // 4))

    def batches(order):
        whole = shared_out(order, 12)
        rest = updates % 4
        epoch = 0 if torch.equal(order, epoch_order(37, 0, job.learning.seed)) else 1
        return whole if epoch < job.learning.epochs - 1 else order[: 12 * rest].split(12)

    trained = simulated(job, UNEVEN)
    torch.testing.assert_close(vector_of(trained.models[0]), by_hand(job, batches), **REORDERED)
    assert trained.result["steps"] == updates
    assert trained.result["epochs"] == pytest.approx(updates / 4, abs=0.001)


@pytest.mark.parametrize("updates", [3, 10, 23])
@pytest.mark.parametrize("spec", ["parameter_server", "ad_psgd", "easgd"])
def test_workers_at_their_own_pace_take_so_many_batches_together(spec, updates):
    job = job_of(spec, updates=updates, epochs=-(-updates // 10))  # 10 batches an epoch
    trained = simulated(job, UNEVEN)
    steps = [event for event in trained.events if isinstance(event, WorkerProgress)]
    assert (
        sum(max(e.step for e in steps if e.worker == worker) for worker in {e.worker for e in steps})
        == updates
    )
    whole, rest = divmod(updates, 10)
    assert images_of(trained) == 37 * whole + min(37, 4 * rest)
    assert trained.result["images_not_seen"] == 0


@pytest.mark.parametrize("spec", ["synchronous", "local_sgd(steps=2)"])
def test_a_run_of_updates_resumes_to_the_same_bits(tmp_path, spec):
    options = {"updates": 7, "epochs": 2}
    whole = simulated(job_of(spec, **options)).sha256
    job = job_of(spec, **options)
    job = replace(job, checkpointing=CheckpointConfig(folder=tmp_path, checkpoints=2))
    assert simulated(job, stop_at(0.06)).events[-1].outcome == "interrupted"
    assert simulated(resumed(job)).sha256 == whole


def configured(**options) -> RunConfig:
    return RunConfig(data="digits", model="mlp", batch_size=64, keep_checkpoints=0, **options)


@pytest.mark.parametrize(
    ("options", "epochs", "steps"),
    [
        ({"workers": 2, "updates": 24}, 2, 24),  # 1438 images in steps of 128: 12 an epoch
        ({"workers": 2, "updates": 25}, 3, 25),
        ({"workers": 2, "updates": 25, "drop_last": True}, 3, 25),  # 11 an epoch
        ({"workers": 2, "updates": 7, "strategy": "ssp"}, 1, 4),
        ({"workers": 2, "updates": 46, "strategy": "parameter_server"}, 2, 23),
        ({"workers": 2, "updates": 47, "strategy": "parameter_server"}, 3, 24),
    ],
)
def test_updates_become_epochs(options, epochs, steps):
    job = assemble(configured(**options), CheckpointConfig(checkpoints=0))
    assert job.learning.epochs == epochs
    if not job.draws:
        assert job.calendar.total_steps == steps
    assert job.deck.epochs == epochs


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"updates": 10, "epochs": 2}, "both set the length"),
        ({"updates": 10, "batch_schedule": "step(at=[0.5])"}, "counts batches of one size"),
        (
            {"drop_last": True, "batch_size": 1000, "workers": 2},
            "drop_last leaves nothing of 1438 training images",
        ),
    ],
)
def test_a_length_that_cannot_be_is_refused(options, reason):
    config = RunConfig(data="digits", model="mlp", **options)
    with pytest.raises(RequestError, match=reason):
        assemble(config, CheckpointConfig(checkpoints=0))


def test_steps_of_a_run_are_the_most_of_a_worker():
    job = job_of("downpour", epochs=2)
    trained = simulated(job, ConstantCluster(step_s=lambda worker: 4.0 if worker == 0 else 1.0))
    steps = {event.worker: event.step for event in trained.events if isinstance(event, WorkerProgress)}
    assert steps[0] < max(steps.values()) == trained.events[-1].result["steps"]


def test_epochs_of_a_dry_run_whose_workers_draw(tmp_path: Path):
    common = {"cluster": "office", "data": "digits", "model": "mlp", "out": tmp_path / "run"}
    figures = polyrhythm.simulate(
        **common, workers=4, epochs=3, strategy="downpour", gradients="none"
    ).figures
    assert figures["steps"] > 3 * -(-1438 // 250)
    assert figures["epochs"] == 3
