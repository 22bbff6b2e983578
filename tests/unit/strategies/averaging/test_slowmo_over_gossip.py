"""SlowMo over gossip against plain torch, resumed anywhere, and what it is refused over."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from conformance.jobs import (
    batch,
    blobs,
    cosine,
    make_job,
    resumed,
    simulated,
    stop_at,
    strategy,
    uneven,
    vector_of,
)
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from sample import failures_of
from simulation.trying import trial

WORKERS, STEPS, LENGTH = 4, 8, 4
ROUND = 3
UNEVEN = ConstantCluster(step_s=uneven)
SGP = f"slowmo(steps={ROUND}, base=sgp)"
D_PSGD = f"slowmo(steps={ROUND}, base=d_psgd)"


def pushed(vectors, step):
    """Keeps half, and sends half one place on in even steps and two in odd ones."""
    offset = 1 if step % 2 == 0 else 2
    return [(vectors[i] + vectors[(i - offset) % WORKERS]) / 2 for i in range(WORKERS)]


def mixed(vectors):
    """Takes a third of each neighbor on a ring."""
    return [sum(vectors[(i + j) % WORKERS] for j in (-1, 0, 1)) / 3 for i in range(WORKERS)]


def reference(job, *, gradient_first):
    """Trains in plain torch, with a slow momentum of 0.5 and a slow rate of 1."""
    torch.manual_seed(job.learning.seed)
    models = [job.make_model() for _ in range(WORKERS)]
    start = parameters_to_vector(models[0].parameters()).detach()
    for model in models:
        vector_to_parameters(start.clone(), model.parameters())
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9) for model in models]
    slow = torch.zeros_like(start)
    for step in range(STEPS):
        rate = cosine(job, step, STEPS)
        points = [parameters_to_vector(model.parameters()).detach().clone() for model in models]
        if not gradient_first:
            points = mixed(points)
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            images, labels = batch(job, step // LENGTH, step % LENGTH, worker, WORKERS)
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            vector_to_parameters(points[worker], model.parameters())
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        vectors = [parameters_to_vector(model.parameters()).detach() for model in models]
        if gradient_first:
            vectors = pushed(vectors, step)
        if (step + 1) % ROUND == 0 or step + 1 == STEPS:
            slow = 0.5 * slow + (start - torch.stack(vectors).mean(0)) / rate
            start = start - rate * slow
            vectors = [start] * WORKERS
        for model, vector in zip(models, vectors, strict=True):
            vector_to_parameters(vector.clone(), model.parameters())
    return vector_of(models[0])


@pytest.mark.parametrize(("spec", "gradient_first"), [(SGP, True), (D_PSGD, False)])
def test_it_is_what_plain_torch_makes_of_the_rule(spec, gradient_first):
    job = make_job(spec, WORKERS, dataset=blobs(train=64), optimizer="sgd(momentum=0.9)")
    for model in simulated(job, UNEVEN).models:
        torch.testing.assert_close(
            vector_of(model), reference(job, gradient_first=gradient_first), rtol=0, atol=2e-6
        )


@pytest.mark.parametrize("spec", [SGP, D_PSGD, f"slowmo(steps={ROUND}, base=sgp(overlap=true))"])
def test_a_resumed_run_has_the_same_bits_wherever_it_stopped(spec, tmp_path):
    whole = simulated(make_job(spec, WORKERS), UNEVEN).sha256
    for place, seconds in enumerate((0.03, 0.07, 0.1)):
        job = make_job(spec, WORKERS, folder=tmp_path / str(place))
        simulated(job, stop_at(seconds))
        assert simulated(resumed(job), UNEVEN).sha256 == whole


def test_with_a_slow_rate_of_one_and_no_momentum_a_round_ends_at_the_mean_of_its_base():
    """Then one round as long as the run ends as gossip itself does."""
    plain = make_job("sgp", WORKERS, schedule="constant")
    slow = make_job("slowmo(steps=1000, base=sgp, slow_momentum=0)", WORKERS, schedule="constant")
    torch.testing.assert_close(
        vector_of(simulated(slow, UNEVEN).models[0]),
        vector_of(simulated(plain, UNEVEN).models[0]),
        rtol=0,
        atol=1e-6,
    )


def test_replicas_are_equal_at_the_end_of_every_round_whatever_goes_wrong():
    assert failures_of(trial("slowmo(steps=2, base=sgp(overlap=true))", steps=6), range(12)) == ()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "slowmo(base=ad_psgd)",
            "slowmo: base=ad_psgd cannot start rounds at a common point: use base=sgp",
        ),
        ("slowmo(base=parameter_server)", "cannot start rounds"),
        ("slowmo(base=local_sgd)", "or leave base out for local steps"),
        (
            "slowmo(base=sgp, optimizer_state=reset)",
            "has no effect with base=sgp, which keeps the optimizer state",
        ),
        ("slowmo(base=sgp(topology=torus))", "torus"),
        ("slowmo(base=gossip)", "unknown base strategy 'gossip'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec, words):
    with pytest.raises(RequestError) as caught:
        strategy(spec).check(3)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
