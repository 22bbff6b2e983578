"""Gradients bounded by their total norm: the bits of plain torch, with every strategy that does not refuse it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from conformance.jobs import batch, cosine, make_job, simulated, strategies, vector_of
from polyrhythm.config.assemble import optimizer_from, strategy_from, try_out
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job, check_network_use
from tolerances import REORDERED

BOUND = 0.05


def job_of(spec: str, workers: int, optimizer: str) -> Job:
    return make_job(spec, workers, optimizer=optimizer, batch_size=8, dtype=torch.float64)


def plain(optimizer: str) -> torch.Tensor:
    """Returns the parameters of a loop with torch's own clipping."""
    job = job_of("synchronous", 1, optimizer)
    torch.manual_seed(job.learning.seed)
    model = job.make_model()
    rule = job.learning.optimizer.create(model.parameters())
    total = job.steps_per_epoch * job.learning.epochs
    norms = []
    for step in range(total):
        for group in rule.param_groups:
            group["lr"] = cosine(job, step, total)
        rule.zero_grad()
        images, labels = batch(job, *divmod(step, job.steps_per_epoch))
        functional.cross_entropy(model(images.double()), labels).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), BOUND)))
        rule.step()
    assert max(norms) > BOUND, "some gradients are longer"
    return vector_of(model)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("spec", ["synchronous", "parameter_server", "d_psgd"])
def test_one_worker_is_plain_torch_with_its_clipping(spec: str, optimizer: str) -> None:
    kept = vector_of(simulated(job_of(spec, 1, f"{optimizer}(clip_norm={BOUND})")).models[0])
    torch.testing.assert_close(kept, plain(optimizer), **REORDERED)


def test_workers_clip_their_mean_gradient_as_one_server_does() -> None:
    optimizer = f"sgd(clip_norm={BOUND})"
    here, there = (
        simulated(job_of(spec, 2, optimizer)).models[0]
        for spec in ("synchronous", "parameter_server(consistency=synchronous)")
    )
    torch.testing.assert_close(vector_of(here), vector_of(there), **REORDERED)


def _check(job: Job) -> None:
    learning, make_model = job.learning, partial(job.make_model)
    try_out(make_model, learning.optimizer, job.strategy, job.workers, job.dataset.image_shape)
    check_network_use(job.strategy, job.workers, torch.float64, learning)


@pytest.mark.parametrize("spec", strategies())
def test_every_strategy_bounds_its_updates_or_refuses(spec: str) -> None:
    job = job_of(spec, 2, "sgd(lr=1.0, momentum=0, clip_norm=1e-5)")
    learning = job.learning
    divided = "servers=" in spec and not spec.startswith("easgd")  # whose workers update their own models
    if divided or spec in ("hybrid", "pipeline", "lazy_synchronous"):
        with pytest.raises(RequestError, match="clip_norm needs the norm of all gradients"):
            _check(job)
        return
    _check(job)
    torch.manual_seed(learning.seed)
    start = vector_of(job.make_model())
    steps = 2 * job.steps_per_epoch * learning.epochs
    for model in simulated(job).models:
        moved = float((vector_of(model) - start).norm())
        assert (
            0 < moved < 10 * steps * 1e-5
        )  # momentum of the strategy's own multiplies steps by less than 10


def test_the_option_bounds_the_optimizer_of_the_strategy() -> None:
    config = configure({"clip_norm": 0.5})
    assert str(optimizer_from(config, strategy_from("synchronous", None))) == "sgd(clip_norm=0.5)"
    with pytest.raises(RequestError, match="differ: give one of them"):
        optimizer_from(
            configure({"clip_norm": 0.5, "optimizer": "adam(clip_norm=1)"}),
            strategy_from("synchronous", None),
        )
