"""Workers that mix in turns lose some of their number: they begin anew at one point, and mix by other matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from conformance.jobs import blobs, cosine, make_job, perceptron, result_of
from polyrhythm.data.dealing import dealt, epoch_order
from polyrhythm.events import Event, RunEnded, WorkerJoined, WorkerLost
from polyrhythm.roles.job import Job
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.gossip.mixing.turns import TurnsWorker
from sample import failures_of
from simulation.deaths import BATCH_SIZE, IMAGES, LENGTH, STEPS, WORKERS, events_of
from simulation.trying import trial

WHOLE_S = 0.2
MOMENTS = [round(WHOLE_S * number / 6, 5) for number in range(6)]
GOSSIP = ["d_psgd", "sgp", "sgp(overlap=True)", "slowmo(steps=3, base=sgp)", "slowmo(steps=3, base=d_psgd)"]


def job_of(spec: str) -> Job:
    return make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE)


def trained(spec: str, kills: Any, successors: Any = ()) -> tuple[list[Event], Tensor]:
    """Runs a job; gives its events and its final parameters."""
    job, models = job_of(spec), []

    def make() -> torch.nn.Module:
        models.append(job.make_model())
        return models[-1]

    events = events_of(replace(job, make_model=make), kills, successors)
    return events, parameters_to_vector(models[0].parameters()).detach()


def of_two(job: Job, *, gradient_first: bool) -> Tensor:
    """Trains two workers in plain torch, who share each batch of three out and take each other's half."""
    torch.manual_seed(job.learning.seed)
    models = [perceptron() for _ in range(2)]
    vector_to_parameters(parameters_to_vector(models[0].parameters()), models[1].parameters())
    data = job.dataset.train
    for step in range(STEPS):
        order, learned = epoch_order(IMAGES, step // LENGTH, job.learning.seed), []
        for place, model in enumerate(models):
            seen = dealt(order, step % LENGTH, place, 2, WORKERS * BATCH_SIZE)
            model.zero_grad()
            functional.cross_entropy(model(data.images(seen)), data.labels[seen]).backward()
            gradients = [parameter.grad.flatten() for parameter in model.parameters()]
            learned.append(torch.cat(gradients) * cosine(job, step, STEPS))
        points = [parameters_to_vector(model.parameters()).detach() for model in models]
        if gradient_first:
            points = [point - change for point, change in zip(points, learned, strict=True)]
            learned = [torch.zeros_like(points[0])] * 2
        mean = (points[0] + points[1]) / 2
        for model, change in zip(models, learned, strict=True):
            vector_to_parameters(mean - change, model.parameters())
    return torch.stack([parameters_to_vector(model.parameters()).detach() for model in models]).mean(0)


@pytest.mark.parametrize(("spec", "gradient_first"), [("d_psgd", False), ("sgp", True)])
def test_without_the_third_two_mix_as_two_do_in_plain_torch(spec: str, gradient_first: bool) -> None:
    job = make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE, optimizer="sgd(momentum=0)")
    models: list[torch.nn.Module] = []

    def make() -> torch.nn.Module:
        models.append(job.make_model())
        return models[-1]

    events = events_of(replace(job, make_model=make), [(0.0, 1)])
    assert (result_of(events)["workers_lost"], result_of(events)["steps"]) == (1, STEPS)
    found = parameters_to_vector(models[0].parameters()).detach()
    torch.testing.assert_close(found, of_two(job, gradient_first=gradient_first), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pause_s", [None, 0.0005, 0.03])
@pytest.mark.parametrize("spec", GOSSIP)
def test_the_others_go_on_whenever_a_worker_dies(spec: str, pause_s: float | None) -> None:
    for at_s in MOMENTS:
        comes = pause_s is not None and at_s + pause_s < WHOLE_S - 0.03
        events, vector = trained(spec, [(at_s, 1)], [(at_s + pause_s, 1)] if comes and pause_s else [])
        assert isinstance(events[-1], RunEnded)
        result = result_of(events)
        assert (events[-1].outcome, result["steps"]) == ("done", STEPS)
        assert result["workers_joined"] == int(comes)
        assert 0 <= result["images_not_seen"] <= BATCH_SIZE
        assert torch.isfinite(vector).all()


def test_all_but_the_leader_may_be_lost_and_come_back() -> None:
    kills = [(0.03, 1), (0.031, 2), (0.06, 1), (0.09, 2)]
    events, _ = trained("sgp", kills, [(0.05, 1), (0.031, 2), (0.0601, 1)])
    assert result_of(events)["steps"] == STEPS
    assert sum(isinstance(event, WorkerLost) for event in events) >= 3
    assert sum(isinstance(event, WorkerJoined) for event in events) >= 2


@pytest.mark.parametrize(
    ("spec", "seeds"),
    [
        ("d_psgd", 16),
        ("d_psgd(topology=exponential)", 8),
        ("sgp", 16),
        ("sgp(overlap=True)", 12),
        ("sgp(topology=star, overlap=True)", 8),
        ("sgp(topology=random_regular(degree=3))", 8),
        ("slowmo(steps=2, base=sgp(overlap=True))", 8),
        ("slowmo(steps=3, base=d_psgd)", 8),
    ],
)
def test_every_gradient_counts_once_under_many_seeds(spec: str, seeds: int) -> None:
    assert failures_of(trial(spec, steps=8), range(300, 300 + seeds)) == ()


@pytest.mark.parametrize("at_s", [0.0535, 0.0545, 0.0555, 0.0565])
def test_a_successor_goes_on_alone_with_what_it_was_handed_when_the_other_dies_before_they_meet(
    at_s: float,
) -> None:
    faults = (
        f"kill(rank=1, at_s=0.05, restart_after_s=0.001); kill(rank=0, at_s={at_s}, restart_after_s=0.001)"
    )
    tried = try_seeds(trial("sgp", workers=2, steps=8, faults=faults), [1])
    assert (tried.seeds, tried.failures) == (1, ())


def test_what_was_handed_on_counts_where_all_are_lost_who_brought_something() -> None:
    """Three times in a row some of them, worker 1 among them, which alone has had the mean at the end of a round."""
    faults = (
        "delay(probability=0.18, seconds=0.00558); delay(probability=0.0176, seconds=0.00217); "
        "kill(rank=any, every_s=0.0481, restart_after_s=0.0)"
    )
    tried = try_seeds(trial("slowmo(steps=3, base=sgp)", steps=8, faults=faults), [241])
    assert (tried.seeds, tried.failures) == (1, ())


def counts_a_copy(self: Any, state: Any, step: int) -> None:
    BEFORE[0](self, state, step)
    self._brings = True


def learns_twice(self: Any, step: Any, update: Any) -> None:
    if self._mixes_from:  # it has lost or gained a neighbor
        update()
    BEFORE[1](self, step, update)


def waits_for_those_behind(self: Any) -> None:
    BEFORE[2](self)
    self._mixes_from = 0


BEFORE: tuple[Any, Any, Any] = (TurnsWorker.enter, TurnsWorker._learn, TurnsWorker.prepare)


@pytest.mark.parametrize(
    ("method", "planted", "found"),
    [
        ("enter", counts_a_copy, "its new start"),
        ("_learn", learns_twice, "parameters after step"),
        ("prepare", waits_for_those_behind, "what mixing by the matrices gives"),
    ],
)
def test_a_planted_bug_is_found(method: str, planted: Any, found: str, monkeypatch: Any) -> None:
    kills = "kill(rank=1, at_s=0.05, restart_after_s=0.001); kill(rank=2, at_s=0.09, restart_after_s=0.001)"
    spec = "d_psgd" if method == "enter" else "sgp"
    tried = trial(spec, steps=10, faults=kills)
    assert try_seeds(tried, range(8)).failures == ()
    monkeypatch.setattr(TurnsWorker, method, planted)
    failures = try_seeds(tried, range(8)).failures
    assert any(found in failure.what for failure in failures), failures
