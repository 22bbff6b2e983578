"""A batch in several passes: the gradients of a plain loop that adds them up."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import (
    batch,
    blobs,
    cosine,
    make_job,
    perceptron,
    resumed,
    simulated,
    stop_at,
    uneven,
    vector_of,
    with_batch_norm,
)
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job, check_network_use
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)


def plain(job: Job, passes: int) -> nn.Module:
    """Trains one model as one worker does, in passes."""
    learning = job.learning
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    total = job.steps_per_epoch * learning.epochs
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = cosine(job, step, total)
        optimizer.zero_grad()
        images, labels = batch(job, *divmod(step, job.steps_per_epoch))
        count = -(-len(labels) // -(-learning.batch_size // passes))
        for part, truth in zip(images.tensor_split(count), labels.tensor_split(count), strict=True):
            loss = functional.cross_entropy(model(part), truth) * (len(truth) / len(labels))
            loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("model", [perceptron, with_batch_norm])
@pytest.mark.parametrize("passes", [2, 3])
def test_passes_have_the_bits_of_a_plain_loop(passes: int, model) -> None:  # type: ignore[no-untyped-def]
    """Of 53 images the batches of 9 have 8 or 9, which are not of one size in every pass either.

    A pass of one image multiplies matrices by a vector, which some processors round by the matrix's address.
    """
    job = make_job("synchronous", 1, model=model, batch_size=9, accumulate=passes)
    assert torch.equal(vector_of(simulated(job, UNEVEN).models[0]), vector_of(plain(job, passes)))


@pytest.mark.parametrize(
    "spec", ["synchronous", "lazy_synchronous", "local_sgd(steps=2)", "parameter_server", "mixed(replicas=2)"]
)
def test_passes_change_nothing_but_rounding(spec: str) -> None:
    shared = {"dtype": torch.float64, "batch_size": 6, "dataset": blobs(train=60)}
    whole, parts = (simulated(make_job(spec, 2, accumulate=passes, **shared), UNEVEN) for passes in (1, 3))
    for one, other in zip(whole.models, parts.models, strict=True):
        torch.testing.assert_close(vector_of(one), vector_of(other), **REORDERED)


def test_a_resumed_run_has_the_same_bits(tmp_path) -> None:  # type: ignore[no-untyped-def]
    job = make_job("synchronous", 2, model=with_batch_norm, batch_size=6, accumulate=3, folder=tmp_path)
    whole = simulated(make_job("synchronous", 2, model=with_batch_norm, batch_size=6, accumulate=3), UNEVEN)
    assert simulated(job, stop_at(0.03)).events[-1].outcome == "interrupted"
    assert simulated(resumed(job), UNEVEN).sha256 == whole.sha256


def test_a_workers_batch_is_that_of_all_its_passes() -> None:
    assert configure({"batch_size": 16, "accumulate": 4}).worker_batch == 64


@pytest.mark.parametrize(
    ("spec", "why"), [("pipeline", "in microbatches anyway"), ("hybrid", "with the other workers, at once")]
)
def test_what_computes_batches_together_refuses(spec: str, why: str) -> None:
    job = make_job(spec, 2, accumulate=2)
    with pytest.raises(RequestError, match=why):
        check_network_use(job.strategy, 2, torch.float32, job.learning)
