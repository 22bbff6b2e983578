"""SVRG: whole runs against plain torch, convergence where SGD has a floor, resumed runs, losses, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import (
    Trained,
    blobs,
    cosine,
    make_job,
    perceptron,
    resumed,
    shared_out,
    simulated,
    stop_at,
    uneven,
    vector_of,
    with_dropout,
    with_dropout_and_batch_norm,
)
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.dealing import epoch_order
from polyrhythm.data.seeding import seed_for
from polyrhythm.data.sources.digits import Digits
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import CheckpointConfig, Job, check_network_use
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.forward_pass import Execution
from polyrhythm.training.svrg import Anchor
from simulation.deaths import events_of
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven, latency_s=1e-3)


def plain_svrg(job: Job, together: int) -> nn.Module:
    """Trains one model by Johnson and Zhang's rule, with the batches of all workers and each step's random numbers."""
    learning, train = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    number, parameters = 0, list(model.parameters())

    def gradient(at: list[Tensor], batch: Tensor, step: int) -> list[Tensor]:
        own = [each.detach().clone() for each in parameters]
        for each, value in zip(parameters, at, strict=True):
            each.data.copy_(value)
        torch.manual_seed(seed_for("step", learning.seed, 0, step))
        loss = functional.cross_entropy(model(train.images(batch).double()), train.labels[batch])
        found = torch.autograd.grad(loss, parameters)
        for each, value in zip(parameters, own, strict=True):
            each.data.copy_(value)
        return list(found)

    for epoch in range(learning.epochs):
        batches = shared_out(epoch_order(len(train), epoch, learning.seed), learning.batch_size * together)
        anchor = [each.detach().clone() for each in parameters]
        statistics = [each.clone() for each in model.buffers()]

        def at_anchor(batch: Tensor, step: int) -> list[Tensor]:
            before = [each.clone() for each in model.buffers()]
            found = gradient(anchor, batch, step)  # noqa: B023 (called at once)
            for each, value in zip(model.buffers(), before, strict=True):
                each.copy_(value)
            return found

        full = [torch.zeros_like(each) for each in parameters]
        for place, batch in enumerate(batches):
            for total, part in zip(full, at_anchor(batch, number + place), strict=True):
                total += part * len(batch) / len(train)
        assert all(torch.equal(each, value) for each, value in zip(model.buffers(), statistics, strict=True))
        for batch in batches:
            there = at_anchor(batch, number)
            here = gradient([each.detach().clone() for each in parameters], batch, number)
            for each, *terms in zip(parameters, here, there, full, strict=True):
                each.grad = terms[0] - terms[1] + terms[2]
            for group in optimizer.param_groups:
                group["lr"] = cosine(job, number, len(batches) * learning.epochs)
            optimizer.step()
            number += 1
    return model


@pytest.mark.parametrize("images", ["own", "all"])
@pytest.mark.parametrize(("strategy", "workers"), [("synchronous", 1), ("synchronous", 3), ("hogwild", 1)])
def test_workers_follow_the_rule_with_one_full_gradient(strategy: str, workers: int, images: str) -> None:
    job = make_job(strategy, workers, dataset=blobs(60), dtype=torch.float64, svrg=images)
    expected = vector_of(plain_svrg(job, workers))
    for model in simulated(job, UNEVEN).models:
        torch.testing.assert_close(vector_of(model), expected, **REORDERED)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("model", [with_dropout, with_dropout_and_batch_norm])
def test_both_gradients_have_the_same_dropout_and_statistics_are_those_of_the_model(
    model: Callable[[], nn.Module], accumulate: int
) -> None:
    """With one pass a step; with two, whose random numbers the plain loop does not have, without dropout."""
    make: Callable[[], nn.Module] = model if accumulate == 1 else perceptron
    job = make_job(
        "synchronous", 1, model=make, dtype=torch.float64, svrg="own", batch_size=6, accumulate=accumulate
    )
    (trained,) = simulated(job, UNEVEN).models
    expected = plain_svrg(job, 1).state_dict()
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(value, expected[name], **REORDERED)


DECAY, CLASSES, PIXELS = 0.01, 10, 64


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES))


def objective(vector: Tensor) -> Tensor:
    """Gives the loss over all training images of the digits, with half the decay times the squared weights."""
    train = Digits().load().train
    images = train.images(torch.arange(len(train))).double().flatten(1)
    weights, biases = vector[:-CLASSES].view(CLASSES, PIXELS), vector[-CLASSES:]
    loss = functional.cross_entropy(images @ weights.T + biases, train.labels)
    return loss + DECAY / 2 * vector.square().sum()


@cache
def least() -> float:
    """Gives the least value of the objective, which is strongly convex."""
    vector = torch.zeros((PIXELS + 1) * CLASSES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [vector], max_iter=500, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = objective(vector)
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    return float(objective(vector.detach()))


def regression(strategy: str, images: str) -> Job:
    rule = f"sgd(lr=0.5, momentum=0, weight_decay={DECAY})"
    keys = {"optimizer": rule, "schedule": "constant", "epochs": 8, "batch_size": 4}
    return make_job(
        strategy, 3, model=logistic, dataset=Digits().load(), dtype=torch.float64, svrg=images, **keys
    )


@cache
def trained(strategy: str, images: str) -> Trained:
    return simulated(regression(strategy, images), UNEVEN)


def above_least(model: nn.Module) -> float:
    return float(objective(vector_of(model))) - least()


def excess(strategy: str, images: str) -> float:
    """Gives by how much a run ends above the least value."""
    return above_least(trained(strategy, images).models[0])


@pytest.mark.parametrize(
    ("strategy", "images", "share"),
    [
        ("synchronous", "own", 1e-3),
        ("parameter_server", "all", 1e-3),
        ("downpour", "all", 1e-2),
        ("easgd(tau=1)", "all", 0.05),
        ("local_sgd(steps=4)", "own", 0.05),
        ("parameter_server", "own", 0.6),
    ],
)
def test_it_converges_at_a_constant_rate_where_sgd_has_a_floor(
    strategy: str, images: str, share: float
) -> None:
    assert excess(strategy, "none") > 0.003
    assert excess(strategy, images) < share * excess(strategy, "none")


@pytest.mark.parametrize("strategy", ["synchronous", "local_sgd(steps=2)"])
@pytest.mark.parametrize("images", ["own", "all"])
def test_a_run_resumed_within_an_epoch_has_the_same_bits(tmp_path, strategy: str, images: str) -> None:  # type: ignore[no-untyped-def]
    job = make_job(strategy, 2, folder=tmp_path, model=with_dropout_and_batch_norm, svrg=images)
    whole = simulated(replace(job, checkpointing=CheckpointConfig()), UNEVEN)
    stopped = simulated(job, stop_at(0.18))
    assert stopped.events[-1].outcome == "interrupted"
    assert stopped.result["steps"] % 7 > 0
    assert simulated(resumed(job), UNEVEN).sha256 == whole.sha256


def test_after_a_loss_the_others_take_an_anchor_over_the_images_of_all() -> None:
    """In the middle of the last epoch's steps; with the anchors of before they would leave the minimum again."""
    job = regression("synchronous", "own")
    lost_s = 15 / 16 * trained("synchronous", "own").events[-1].time_s
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(job.make_model())
        return models[-1]

    events = events_of(replace(job, make_model=make), [(lost_s, 1)], [])
    assert events[-1].result["workers_lost"] == 1
    assert torch.equal(vector_of(models[0]), vector_of(models[2]))
    assert above_least(models[0]) < 1e-3 * excess("synchronous", "none")


def test_simulations_count_the_passes() -> None:
    """One over the images for each full gradient, and two in each step."""
    seconds = {
        images: simulated(make_job("synchronous", 1, svrg=images), ConstantCluster(step_s=lambda _: 0.01))
        .events[-1]
        .time_s
        for images in ("none", "own")
    }
    assert seconds["own"] == pytest.approx(3 * seconds["none"], rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "options", "dtype", "reason"),
    [
        ("hybrid", {}, torch.float32, "computes gradients jointly"),
        ("lazy_synchronous", {}, torch.float32, "exchanges inside of forward passes"),
        ("synchronous(compress=sufficient_factors)", {}, torch.float32, "collects factors"),
        ("synchronous", {"optimizer": "kfac"}, torch.float32, "uses each worker's own gradients"),
        ("synchronous", {"execution": Execution(compiled=True)}, torch.float32, "compile binds"),
        ("synchronous", {}, torch.float16, "float16 scales"),
    ],
)
def test_passes_that_do_more_than_compute_a_gradient_are_refused(
    strategy: str, options: dict[str, object], dtype: torch.dtype, reason: str
) -> None:
    job = make_job(strategy, 2, svrg="own", **options)
    with pytest.raises(RequestError, match=f"{reason}.*leave one of them out"):
        check_network_use(job.strategy, 2, dtype, job.learning)


def test_own_images_must_be_known_in_advance() -> None:
    asked = {"data": "digits", "model": "mlp", "strategy": "parameter_server", "workers": 2}
    assert assemble(configure(asked | {"svrg": "all"}), CheckpointConfig()).draws
    assert not assemble(configure(asked | {"svrg": "own"}), CheckpointConfig()).draws
    with pytest.raises(RequestError, match="leave batches out, or use svrg all"):
        assemble(configure(asked | {"svrg": "own", "batches": "dynamic"}), CheckpointConfig())


def test_an_anchor_of_another_network_is_refused() -> None:
    anchor = Anchor("epoch 0", torch.zeros(3), torch.zeros(3))
    like = torch.zeros(3, dtype=torch.float64)
    assert Anchor.restored("epoch 0", anchor.tensors(), like).vector.dtype == torch.float64
    for tensors in ({"vector": torch.zeros(3)}, {"vector": torch.zeros(4), "gradient": torch.zeros(4)}):
        with pytest.raises(RequestError, match="another network"):
            Anchor.restored("epoch 0", tensors, like)
