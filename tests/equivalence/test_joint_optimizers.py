"""Optimizers that look at all workers' data: whole runs against plain loops, losses, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import (
    CLASSES,
    blobs,
    cosine,
    make_job,
    resumed,
    shared_out,
    simulated,
    stop_at,
    strategies,
    strategy,
    uneven,
    vector_of,
    with_batch_norm,
)
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.dealing import epoch_order
from polyrhythm.errors import RequestError
from polyrhythm.events import RunEnded
from polyrhythm.roles.job import CheckpointConfig, Job, check_network_use
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.forward_pass import Execution
from simulation.deaths import events_of
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven, latency_s=1e-3)
KFAC = "kfac(fisher=exact, factor_every=2, inverse_every=3, damping=0.1, decay=0.6, weight_decay=0.01)"
HESSIAN_FREE = "hessian_free(iterations=8)"


def plain_kfac(job: Job, together: int) -> torch.Tensor:
    """Trains the perceptron by K-FAC with Kronecker products written out, in batches of all workers."""
    torch.manual_seed(job.learning.seed)
    model = job.make_model()
    layers = [model[1], model[3]]
    train, size = job.dataset.train, job.learning.batch_size * together
    steps = [
        indices
        for epoch in range(job.learning.epochs)
        for indices in shared_out(epoch_order(len(train), epoch, job.learning.seed), size)
    ]
    factors, inverses, momenta = {}, {}, {}
    seen = 0
    for step, indices in enumerate(steps):
        images, labels = train.images(indices).double().flatten(1), train.labels[indices]
        hidden = layers[0](images)
        scores = layers[1](hidden.tanh())
        inputs = [images, hidden.tanh()]
        model.zero_grad()
        if step % 2 == 0:
            seen += 1
            kept = min(1 - 1 / seen, 0.6)
            likely = scores.softmax(1).detach()
            outputs = [torch.zeros(5, 5).double(), torch.zeros(3, 3).double()]
            for truth in range(CLASSES):
                target = torch.full((len(images),), truth)
                loss = functional.cross_entropy(scores, target, reduction="none").sum()
                slopes = torch.autograd.grad(loss, [hidden, scores], retain_graph=True)
                for number, slope in enumerate(slopes):
                    outputs[number] += torch.einsum("b,bi,bj->ij", likely[:, truth], slope, slope) / len(
                        images
                    )
            for number in range(2):
                rows = torch.cat([inputs[number].detach(), torch.ones(len(images), 1)], 1)
                new = (rows.T @ rows / len(images), outputs[number])
                old = factors.get(number, new)
                factors[number] = tuple(kept * o + (1 - kept) * n for o, n in zip(old, new, strict=True))
        if step % 3 == 0:
            for number, (before, after) in factors.items():
                whole = torch.kron(after, before)
                inverses[number] = torch.linalg.inv(whole + 0.1 * torch.eye(len(whole), dtype=torch.float64))
        functional.cross_entropy(scores, labels).backward()
        rate, total, directions = cosine(job, step, len(steps)), 0.0, []
        for number, layer in enumerate(layers):
            own = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            own = own + 0.01 * torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
            natural = (inverses[number] @ own.reshape(-1)).view(own.shape)
            total += rate**2 * float((natural * own).sum())
            directions.append(natural)
        scale = min(1.0, (0.001 / total) ** 0.5) if total else 1.0
        for number, layer in enumerate(layers):
            momenta[number] = 0.9 * momenta.get(number, 0.0) + scale * directions[number]
            with torch.no_grad():
                layer.weight -= rate * momenta[number][:, :-1]
                layer.bias -= rate * momenta[number][:, -1]
    return vector_of(model)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_share_what_a_plain_loop_does_alone(workers: int) -> None:
    """Of 53 images the batches of three workers are uneven, and an image counts the same in all of them."""
    job = make_job("synchronous", workers, optimizer=KFAC, dtype=torch.float64)
    trained = simulated(job, UNEVEN)
    expected = plain_kfac(job, workers)
    for model in trained.models:
        torch.testing.assert_close(vector_of(model), expected, **REORDERED)


@pytest.mark.parametrize("optimizer", [KFAC, HESSIAN_FREE, "kfac"])
@pytest.mark.parametrize("collective", ["library", "ring"])
def test_all_workers_hold_the_same_bits(optimizer: str, collective: str) -> None:
    job = make_job(f"synchronous(collective={collective})", 3, optimizer=optimizer)
    first, *others = (vector_of(model) for model in simulated(job, UNEVEN).models)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("passes", [1, 3])
def test_hessian_free_with_three_workers_is_one_with_their_batches(passes: int) -> None:
    shared = {"optimizer": HESSIAN_FREE, "dtype": torch.float64, "dataset": blobs(train=60)}
    alone = simulated(make_job("synchronous", 1, batch_size=12, **shared), UNEVEN)
    several = simulated(make_job("synchronous", 3, batch_size=4, accumulate=passes, **shared), UNEVEN)
    expected = vector_of(alone.models[0])
    torch.testing.assert_close(vector_of(several.models[0]), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimizer", [KFAC, HESSIAN_FREE])
@pytest.mark.parametrize("model", [None, with_batch_norm])
def test_a_resumed_run_has_the_same_bits(tmp_path, optimizer: str, model) -> None:  # type: ignore[no-untyped-def]
    keys = {"optimizer": optimizer} | ({"model": model} if model else {})
    job = make_job("synchronous", 2, folder=tmp_path, **keys)
    whole = simulated(replace(job, checkpointing=CheckpointConfig()), UNEVEN)
    assert simulated(job, stop_at(0.05)).events[-1].outcome == "interrupted"
    assert simulated(resumed(job), UNEVEN).sha256 == whole.sha256


@pytest.mark.parametrize("optimizer", [KFAC, HESSIAN_FREE, "adascale"])
def test_whenever_a_worker_dies_the_run_is_that_of_the_same_batches(optimizer: str) -> None:
    """A step that broke between factors, products or decompositions changes nothing, and is taken again.

    While it is away the others compute its part, and its images are added up in another order.
    """
    job = make_job("synchronous", 3, optimizer=optimizer, dtype=torch.float64, schedule="constant")
    expected = vector_of(simulated(job, UNEVEN).models[0])
    lost = 0
    for moment in range(6):
        at_s = 0.02 + 0.0262 * moment
        models: list[nn.Module] = []

        def make(models: list[nn.Module] = models) -> nn.Module:
            models.append(job.make_model())
            return models[-1]

        events = events_of(replace(job, make_model=make), [(at_s, 1)], [(at_s + 0.004, 1)])
        assert isinstance(events[-1], RunEnded)
        assert events[-1].outcome == "done"
        lost += events[-1].result["workers_lost"]
        if optimizer != "adascale":  # of which the number of workers is no mere division of work
            torch.testing.assert_close(vector_of(models[0]), expected, rtol=1e-9, atol=1e-9)
    assert lost > 3


@pytest.mark.parametrize("optimizer", ["kfac", "hessian_free", "adascale"])
def test_who_has_no_mean_of_all_gradients_refuses_in_a_line(optimizer: str) -> None:
    refusing = [each for each in strategies() if not strategy(each).traits(3).mean_updates]
    assert len(refusing) > 30
    for spec in refusing:
        job = make_job(spec, 3, optimizer=optimizer)
        with pytest.raises(RequestError, match=f"optimizer {optimizer} looks at all workers' data"):
            check_network_use(job.strategy, 3, torch.float32, job.learning)


def test_a_request_is_refused_before_it_begins() -> None:
    asked = {"data": "digits", "model": "mlp", "optimizer": "kfac", "workers": 2}
    with pytest.raises(RequestError, match="use synchronous, or another optimizer"):
        assemble(configure(asked | {"strategy": "parameter_server"}), CheckpointConfig())
    assert assemble(configure(asked), CheckpointConfig()).learning.optimizer.name == "kfac"


@pytest.mark.parametrize(
    ("optimizer", "dtype", "compiled"),
    [
        ("kfac", torch.float16, False),
        ("kfac", torch.float32, True),
        ("hessian_free", torch.bfloat16, False),
    ],
)
def test_networks_that_cannot_be_followed_are_refused(
    optimizer: str, dtype: torch.dtype, compiled: bool
) -> None:
    job = make_job("synchronous", 2, optimizer=optimizer, execution=Execution(compiled=compiled))
    with pytest.raises(RequestError, match="leave compile out, and give --precision float32"):
        check_network_use(job.strategy, 2, dtype, job.learning)
