"""Averaging strategies against the papers' rules in plain torch, on N models and N optimizers of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import batch, blobs, cosine, make_job, simulated, uneven, vector_of
from polyrhythm.simulation.run import ConstantCluster

WORKERS = 3
STEPS_PER_EPOCH = 5
STEPS = 2 * STEPS_PER_EPOCH
UNEVEN = ConstantCluster(step_s=uneven)

Models = list[nn.Module]
Optimizers = list[torch.optim.Optimizer]
Meet = Callable[[int, Models, Optimizers, float], None]
"""Told the steps done so far, the models, their optimizers and the step's learning rate."""


def fill(models: Models, vector: Tensor) -> None:
    for model in models:
        nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def mean(models: Models) -> Tensor:
    return torch.stack([vector_of(model) for model in models]).mean(0)


def reference(job, meet: Meet) -> Tensor:
    """Trains every worker's own model; gives the mean of all in the end."""
    learning = job.learning
    torch.manual_seed(learning.seed)
    first = job.make_model()
    models = [deepcopy(first) for _ in range(WORKERS)]
    optimizers = [learning.optimizer.create(model.parameters()) for model in models]
    for step in range(STEPS):
        rate = cosine(job, step, STEPS) if learning.schedule.name == "cosine" else learning.optimizer.lr
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            images, labels = batch(job, step // STEPS_PER_EPOCH, step % STEPS_PER_EPOCH, worker, WORKERS)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            functional.cross_entropy(model(images.double()), labels).backward()
            optimizer.step()
        meet(step + 1, models, optimizers, rate)
    return mean(models)


def found(spec: str, **options) -> tuple[object, Tensor]:
    job = make_job(spec, WORKERS, dtype=torch.float64, **options)
    return job, vector_of(simulated(job, UNEVEN).models[0])


def begin(job) -> Tensor:
    torch.manual_seed(job.learning.seed)
    return vector_of(job.make_model())


def assert_is_reference(job, trained: Tensor, meet: Meet) -> None:
    torch.testing.assert_close(trained, reference(job, meet), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)"])
@pytest.mark.parametrize("at_average", ["keep", "average", "reset"])
def test_local_sgd_and_what_becomes_of_the_optimizers(at_average, optimizer):
    job, trained = found(f"local_sgd(steps=2, optimizer_state={at_average})", optimizer=optimizer)

    def meet(done, models, optimizers, rate):
        if done % 2:
            return
        fill(models, mean(models))
        if at_average == "reset":
            for each in optimizers:
                each.state.clear()
        elif at_average == "average":
            for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                for together in zip(*(each.param_groups[0]["params"] for each in optimizers), strict=True):
                    states = [each.state[own] for each, own in zip(optimizers, together, strict=True)]
                    if key in states[0]:
                        average = torch.stack([state[key] for state in states]).mean(0)
                        for state in states:
                            state[key].copy_(average)

    assert_is_reference(job, trained, meet)


def test_optimizer_states_matter():
    """Else the three ways of treating them would not be told apart."""
    vectors = [
        found(f"local_sgd(steps=2, optimizer_state={rule})")[1] for rule in ("keep", "average", "reset")
    ]
    for one in range(3):
        assert (vectors[one] - vectors[one - 1]).abs().max() > 1e-4


def test_post_local_sgd_is_synchronous_first():
    job, trained = found("post_local_sgd(after=4, steps=3)", dataset=blobs(train=60))

    def meet(done, models, optimizers, rate):
        if done <= 4:  # equal batches: the mean of models is the step of the mean gradient, momentum and all
            fill(models, mean(models))
            for together in zip(*(each.param_groups[0]["params"] for each in optimizers), strict=True):
                states = [each.state[own] for each, own in zip(optimizers, together, strict=True)]
                average = torch.stack([state["momentum_buffer"] for state in states]).mean(0)
                for state in states:
                    state["momentum_buffer"].copy_(average)
        elif (done - 4) % 3 == 0:
            fill(models, mean(models))

    assert_is_reference(job, trained, meet)


def test_hierarchical_averaging():
    job, trained = found("hierarchical_averaging(group=2, steps=2, steps_between=5)")

    def meet(done, models, optimizers, rate):
        if done % 5 == 0:
            fill(models, mean(models))
        elif done % 2 == 0:
            fill(models[:2], mean(models[:2]))

    assert_is_reference(job, trained, meet)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf(nesterov):
    m, z = 0.6, 0.8
    job, trained = found(f"bmuf(steps=3, block_momentum={m}, block_lr={z}, nesterov={nesterov})")
    model = start = begin(job)
    update = torch.zeros_like(model)

    def end_block(models):
        nonlocal model, start, update
        gradient = mean(models) - start
        update = m * update + z * gradient
        model = model + update
        start = model + m * update if nesterov else model
        fill(models, start)

    def meet(done, models, optimizers, rate):
        if done % 3 == 0:
            end_block(models)
        elif done == STEPS:  # the run ends in the middle of a block, which is over then, and shows W
            end_block(models)
            fill(models, model)

    assert_is_reference(job, trained, meet)


def test_the_look_ahead_is_no_base_of_the_next_block():
    """In fairseq's and CNTK's form momentum counts twice, which must be seen in the test above."""
    job, trained = found("bmuf(steps=3, block_momentum=0.6, nesterov=True)")
    base = begin(job)
    update = torch.zeros_like(base)

    def meet(done, models, optimizers, rate):
        nonlocal base, update
        if done % 3 == 0 or done == STEPS:
            update = 0.6 * update + (mean(models) - base)
            base = base + update + (0.6 * update if done < STEPS else 0)
            fill(models, base)

    assert (reference(job, meet) - trained).abs().max() > 1e-3


def test_block_momentum_is_told_by_the_workers():
    by_itself, told = (
        found(spec)[1] for spec in ("bmuf(steps=3)", f"bmuf(steps=3, block_momentum={1 - 1 / WORKERS})")
    )
    assert torch.equal(by_itself, told)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("optimizer", "state"), [("sgd", None), ("sgd", "keep"), ("adam(lr=0.01)", None)])
def test_slowmo(schedule, optimizer, state):
    a, b = 0.9, 0.7
    more = f", optimizer_state={state}" if state else ""
    spec = f"slowmo(steps=3, slow_momentum={b}, slow_lr={a}{more})"
    job, trained = found(spec, schedule=schedule, optimizer=optimizer)
    start = begin(job)
    slow = torch.zeros_like(start)

    def meet(done, models, optimizers, rate):
        nonlocal start, slow
        if done % 3 == 0 or done == STEPS:
            slow = b * slow + (start - mean(models)) / rate
            start = start - a * rate * slow
            fill(models, start)
            if (
                optimizer == "sgd" and state is None
            ):  # the paper's runs begin SGD's momentum anew in every round
                for each in optimizers:
                    each.state.clear()

    assert_is_reference(job, trained, meet)


@pytest.mark.parametrize("inner", ["sgd", "adam(lr=0.01)"])
def test_diloco(inner):
    lr, mu = 0.7, 0.9
    job, trained = found("diloco(steps=3)", optimizer=inner)
    model = begin(job)
    speed = torch.zeros_like(model)

    def meet(done, models, optimizers, rate):
        nonlocal model, speed
        if done % 3 == 0 or done == STEPS:
            change = model - mean(models)
            speed = mu * speed + change
            model = model - lr * (change + mu * speed)
            fill(models, model)

    assert_is_reference(job, trained, meet)


def corrected(
    job,
    steps: int,
    term: Callable[[int, Tensor, Tensor], Tensor],
    end_round: Callable[[list[Tensor], Tensor], Tensor],
) -> Tensor:
    """Trains every worker's own model, with a term added to each gradient; gives the consensus in the end.

    Args:
        term: told the worker, its parameters and its gradient; gives what is added.
        end_round: told the workers' parameters and the round's first ones; gives the next round's.
    """
    learning = job.learning
    torch.manual_seed(learning.seed)
    start = vector_of(first := job.make_model())
    models = [deepcopy(first) for _ in range(WORKERS)]
    optimizers = [learning.optimizer.create(model.parameters()) for model in models]
    for step in range(STEPS):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            images, labels = batch(job, step // STEPS_PER_EPOCH, step % STEPS_PER_EPOCH, worker, WORKERS)
            optimizer.zero_grad()
            functional.cross_entropy(model(images.double()), labels).backward()
            gradient = nn.utils.parameters_to_vector([each.grad for each in model.parameters()])
            added = term(worker, vector_of(model), gradient)
            place = 0
            for each in model.parameters():
                each.grad += added[place : place + each.numel()].view_as(each)
                place += each.numel()
            optimizer.step()
        if (step + 1) % steps == 0 or step + 1 == STEPS:
            start = end_round([vector_of(model) for model in models], start)
            fill(models, start)
    return start


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.05, momentum=0)", "sgd(lr=0.05)", "adam(lr=0.01)"])
def test_scaffold(optimizer):
    job, trained = found("scaffold(steps=4)", optimizer=optimizer, schedule="constant")
    own = [torch.zeros_like(begin(job)) for _ in range(WORKERS)]
    common = torch.zeros_like(own[0])
    seen: list[list[Tensor]] = [[] for _ in range(WORKERS)]

    def term(worker, vector, gradient):
        seen[worker].append(gradient.clone())
        return common - own[worker]

    def end_round(vectors, start):
        nonlocal common
        for worker, vector in enumerate(vectors):
            if "momentum=0" in optimizer:  # option II of the paper, from the models alone
                own[worker] = own[worker] - common + (start - vector) / (len(seen[worker]) * 0.05)
            else:
                own[worker] = torch.stack(seen[worker]).mean(0)
            seen[worker].clear()
        common = torch.stack(own).mean(0)
        return torch.stack(vectors).mean(0)

    expected = corrected(job, 4, term, end_round)
    torch.testing.assert_close(trained, expected, rtol=1e-10, atol=1e-12)
    plain = found("local_sgd(steps=4)", optimizer=optimizer, schedule="constant")[1]
    assert (trained - plain).abs().max() > 1e-4


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.05, momentum=0)", "sgd(lr=0.05)", "adam(lr=0.01)"])
def test_admm(optimizer):
    rho = 0.7
    job, trained = found(f"admm(steps=4, rho={rho})", optimizer=optimizer, schedule="constant")
    consensus = begin(job)
    duals = [torch.zeros_like(consensus) for _ in range(WORKERS)]

    def term(worker, vector, gradient):
        return rho * (vector - consensus + duals[worker])

    def end_round(vectors, start):
        nonlocal consensus
        consensus = torch.stack([x + u for x, u in zip(vectors, duals, strict=True)]).mean(0)
        for worker, vector in enumerate(vectors):
            duals[worker] = duals[worker] + vector - consensus
        return consensus

    expected = corrected(job, 4, term, end_round)
    torch.testing.assert_close(trained, expected, rtol=1e-10, atol=1e-12)
    plain = found("local_sgd(steps=4)", optimizer=optimizer, schedule="constant")[1]
    assert (trained - plain).abs().max() > 1e-4
