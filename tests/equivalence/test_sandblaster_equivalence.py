"""Sandblaster against synchronous servers, and against L-BFGS in plain torch."""

import pytest
import torch
from torch.nn import functional

from conformance.jobs import batch, blobs, cosine, make_job, perceptron, simulated, uneven, vector_of
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)
WORKERS, STEPS = 2, 26
PLAIN = "sgd(lr=0.5, momentum=0)"


def job_of(spec, **learning):
    learning = {"optimizer": PLAIN, "dataset": blobs(train=4 * WORKERS * STEPS), "epochs": 1} | learning
    return make_job(spec, WORKERS, **{"dtype": torch.float64, **learning})


def gradient(job, vector, steps):
    """The mean gradient of all portions of a batch, each worker's."""
    model = perceptron().to(vector.dtype)
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    portions = [batch(job, 0, step, worker, WORKERS) for step in steps for worker in range(WORKERS)]
    images, labels = (torch.cat(several) for several in zip(*portions, strict=True))
    functional.cross_entropy(model(images.to(vector.dtype)), labels).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def direction(pairs, found):
    """The two loops, on vectors."""
    shares = []
    for s, y in reversed(pairs):
        shares.append((s @ found) / (s @ y))
        found = found - shares[-1] * y
    if pairs:
        s, y = pairs[-1]
        found = found * (s @ y) / (y @ y)
    for s, y in pairs:
        found = found + s * (shares.pop() - (y @ found) / (s @ y))
    return found


def by_hand(job, *, portions, memory, trials, tolerance):
    """Plays the rule a batch at a time; gives the parameters, and how many steps were corrected."""
    torch.manual_seed(job.learning.seed)
    now = vector_of(job.make_model())
    pairs, line, corrected, tried = [], None, 0, 0
    for first in range(0, STEPS, portions):
        steps = range(first, min(first + portions, STEPS))
        found = gradient(job, now, steps)
        if line is not None:
            begin, before = line
            walked = now - begin
            slope_before, slope = before @ walked, found @ walked
            if slope_before < 0 and abs(slope) > tolerance * -slope_before and tried < trials:
                straight = slope_before / (slope_before - slope)
                factor = 10.0 if slope <= slope_before else min(max(straight, 0.1), 10.0)
                now, tried, corrected = begin + factor * walked, tried + 1, corrected + 1
                continue
            if walked @ (found - before) > 1e-8 * walked.norm() * (found - before).norm():
                pairs = [*pairs, (walked, found - before)][-memory:] if memory else []
        line, tried = (now, found), 0
        now = now - cosine(job, steps[-1], STEPS) * direction(pairs, found)
    return now, corrected


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    ("portions", "memory", "trials", "tolerance"),
    [(1, 3, 0, 0.0), (1, 10, 2, 0.1), (2, 5, 1, 0.5), (3, 10, 1, 0.2)],
)
def test_two_workers_by_hand(portions, memory, trials, tolerance, servers):
    keys = {"portions": portions, "memory": memory, "trials": trials, "tolerance": tolerance}
    spec = f"sandblaster({', '.join(f'{key}={value}' for key, value in keys.items())}, servers={servers})"
    job = job_of(spec)
    expected, corrected = by_hand(job, **keys)
    assert (corrected > 0) == (trials > 0)
    found = vector_of(simulated(job, UNEVEN).models[0])
    torch.testing.assert_close(found, expected, **REORDERED)


@pytest.mark.parametrize("servers", [1, 3])
def test_without_memory_and_trials_it_is_the_synchronous_server_bit_for_bit(servers):
    plain, blasted = (
        simulated(job_of(spec, dtype=torch.float32, optimizer="adam"), UNEVEN).sha256
        for spec in (
            f"parameter_server(consistency=synchronous, servers={servers})",
            f"sandblaster(portions=1, memory=0, trials=0, servers={servers})",
        )
    )
    assert plain == blasted


def test_momentum_makes_steps_as_long_as_they_become():
    short, long = (
        simulated(job_of("sandblaster", optimizer=f"sgd({keys})")).models[0]
        for keys in ("lr=0.05, momentum=0.9", "lr=0.5, momentum=0")
    )
    torch.testing.assert_close(vector_of(short), vector_of(long), **REORDERED)
