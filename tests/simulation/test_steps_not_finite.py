"""A loss or a gradient that is not finite ends the run in one line, or its worker takes no part in the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import batch, blobs, cosine, make_job, perceptron, simulated, vector_of, with_batch_norm
from polyrhythm.data.dataset import TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.events import Notice
from polyrhythm.roles.job import FaultTolerance, Job

SKIP = FaultTolerance(skips_not_finite=True)


def job_of(spec: str, workers: int, bad: tuple[int, ...] = (9,), **options: Any) -> Job:
    """Returns a job with images that are not a number."""
    dataset = blobs(train=48, test=6)
    images = dataset.train.images(torch.arange(48)).clone()
    images[list(bad)] = float("nan")
    job = make_job(
        spec, workers, dataset=replace(dataset, train=TensorSplit(images, dataset.train.labels)), **options
    )
    return replace(job, fault_tolerance=SKIP)


def plainly(job: Job) -> torch.Tensor:
    """Trains in plain torch with the mean over those workers' batches that are finite."""
    torch.manual_seed(job.learning.seed)
    model, total = job.make_model(), job.calendar.total_steps
    optimizer = job.learning.optimizer.create(model.parameters())
    for step in range(total):
        epoch, inside = divmod(step, total // job.learning.epochs)
        shares = [batch(job, epoch, inside, worker, job.workers) for worker in range(job.workers)]
        finite = [(images, labels) for images, labels in shares if bool(images.isfinite().all())]
        for group in optimizer.param_groups:
            group["lr"] = cosine(job, step, total)
        optimizer.zero_grad()
        for images, labels in finite:
            (functional.cross_entropy(model(images), labels) / len(finite)).backward()
        if finite:
            optimizer.step()
    return vector_of(model)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_step_without_finite_gradients_is_that_of_the_other_workers(workers: int) -> None:
    job = job_of("synchronous", workers, optimizer="sgd(momentum=0.9)")
    trained = simulated(job)
    for model in trained.models[-workers:]:
        torch.testing.assert_close(vector_of(model), plainly(job))
    texts = [event.text for event in trained.events if isinstance(event, Notice)]  # one in each epoch
    assert len(texts) == 2
    assert all(
        text.endswith("took no part in 1 step: its loss or gradients were not finite") for text in texts
    )


@pytest.mark.parametrize("spec", ["local_sgd(steps=2)", "parameter_server", "lazy_synchronous"])
def test_other_strategies_skip_such_steps_too(spec: str) -> None:
    assert bool(vector_of(simulated(job_of(spec, 2)).models[0]).isfinite().all())


def test_a_gradient_that_is_not_finite_counts_where_the_loss_is_finite() -> None:
    class Root(nn.Module):
        """The derivative of the root of 0 is infinite."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.detach().abs().sqrt() * 0 + (x - x.detach()).abs().sqrt()

    def model() -> nn.Module:
        return nn.Sequential(perceptron(), Root())

    start = vector_of(model())
    torch.manual_seed(3)
    start = vector_of(model())
    job = replace(make_job("synchronous", 2, model=model, epochs=1), fault_tolerance=SKIP)
    assert torch.equal(vector_of(simulated(job).models[-1]), start)


def test_statistics_of_a_skipped_batch_do_not_count() -> None:
    trained = simulated(job_of("synchronous", 2, model=with_batch_norm))
    assert all(bool(value.isfinite().all()) for model in trained.models[-2:] for value in model.buffers())


def test_a_run_that_takes_no_step_any_more_ends() -> None:
    job = job_of("synchronous", 2, bad=tuple(range(48)), epochs=20)
    with pytest.raises(RequestError, match=r"the loss is nan at step 100 of worker \d"):
        simulated(job)


def test_without_the_option_the_run_ends() -> None:
    job = replace(job_of("synchronous", 2), fault_tolerance=FaultTolerance())
    with pytest.raises(RequestError, match="the loss is nan at step"):
        simulated(job)
