"""Asynchronous periodic averaging: the mean by hand, and a whole run by a reference that knows only who came when."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import batch, blobs, make_job, simulated, strategy, vector_of
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from sample import failures_of
from simulation.trying import trial


def test_a_whole_run_by_hand():
    """Two workers, one twice as quick: exchanges in the order of time, each with the gradient of the model before."""
    share, steps, rate, total = 0.5, 3, 0.05, 8
    job = make_job(
        f"periodic_averaging(steps={steps}, share={share})",
        2,
        dataset=blobs(train=total * 8),
        dtype=torch.float64,
        epochs=1,
        schedule="constant",
        optimizer=f"sgd(lr={rate}, momentum=0)",
    )
    torch.manual_seed(job.learning.seed)
    first = job.make_model()
    models = [deepcopy(first), deepcopy(first)]
    mean = vector_of(first)

    def gradient(worker, step):
        images, labels = batch(job, 0, step, worker, 2)
        loss = functional.cross_entropy(models[worker](images.double()), labels)
        return torch.cat(
            [part.reshape(-1) for part in torch.autograd.grad(loss, list(models[worker].parameters()))]
        )

    durations = (0.01, 0.0203)
    starts = sorted(
        (durations[worker] * step, worker, step) for worker in (0, 1) for step in range(total + 1)
    )
    for _, worker, step in starts:
        slope, own = gradient(worker, step), vector_of(models[worker])
        if step % steps == 0:
            mean = (1 - share) * mean + share * own
            own = mean
        nn.utils.vector_to_parameters(own - rate * slope, models[worker].parameters())
    for worker in (1, 0):  # the leader leaves last
        mean = (1 - share) * mean + share * vector_of(models[worker])
    around = ConstantCluster(
        step_s=lambda worker: durations[worker], latency_s=1e-6, bandwidth_bytes_per_s=1e12
    )
    found = vector_of(simulated(job, around).models[0])
    torch.testing.assert_close(found, mean, rtol=1e-9, atol=1e-11)


def test_nobody_waits_for_the_slow():
    job = make_job("periodic_averaging(steps=2)", 3, dataset=blobs(train=120), epochs=1)
    slow = ConstantCluster(step_s=lambda worker: 1.0 if worker == 2 else 0.01)
    events = simulated(job, slow).events
    done = {event.worker: event.time_s for event in events if type(event).__name__ == "WorkerProgress"}
    assert done[0] < 0.2
    assert done[2] > 9


@pytest.mark.parametrize("spec", ["periodic_averaging(steps=2)", "periodic_averaging(steps=2, servers=2)"])
def test_invariants_hold_when_workers_come_and_go(spec):
    assert failures_of(trial(spec, workers=3, steps=10), range(20)) == ()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("periodic_averaging(steps=0)", "steps should be greater than or equal to 1"),
        ("periodic_averaging(share=1)", "share should be less than 1"),
        ("periodic_averaging(servers=0)", "servers should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused(spec, words):
    with pytest.raises(RequestError, match=words):
        strategy(spec)
