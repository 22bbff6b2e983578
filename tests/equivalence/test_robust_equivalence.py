"""Robust aggregators: their rules in plain numpy over drawn gradients with many ties, and whole runs of two servers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from conformance.jobs import blobs, make_job, simulated, uneven, vector_of
from equivalence.arrivals import Workers
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import build
from polyrhythm.strategies.aggregator import AGGREGATORS, squared_distances


def by_krum(gradients, f):
    """Gives positions, the best first; of equal scores the first one."""
    count = len(gradients)
    scores = []
    for one in range(count):
        away = sorted(
            np.sum((gradients[one] - gradients[other]) ** 2) for other in range(count) if other != one
        )
        scores.append((sum(away[: count - f - 2]), one))
    return [one for _, one in sorted(scores)]


def krum(gradients, f):
    return gradients[by_krum(gradients, f)[0]]


def multi_krum(gradients, f, m=None):
    m = len(gradients) - f - 2 if m is None else m
    return np.sum(gradients[by_krum(gradients, f)[:m]], axis=0) / m


def trimmed_mean(gradients, k):
    ordered = np.sort(gradients, axis=0)
    kept = ordered[k : len(gradients) - k]
    return np.sum(kept, axis=0) / len(kept)


def coordinate_median(gradients, f):
    return np.median(gradients, axis=0)


RULES = {
    "krum": (krum, "f", 3),
    "multi_krum": (multi_krum, "f", 3),
    "trimmed_mean": (trimmed_mean, "k", 1),
    "coordinate_median": (coordinate_median, "f", 1),
}
"""The rule, the key of its strength s, and the gradients that it needs beside 2 s."""


def spec_of(name, strength, **more):
    keys = {RULES[name][1]: strength} | more
    return f"{name}({', '.join(f'{key}={value}' for key, value in keys.items())})"


def found_by(spec, gradients):
    made = build("aggregator", spec, AGGREGATORS)
    made.check(len(gradients))
    given = [torch.tensor(each) for each in gradients]
    distances = squared_distances(given) if made.whole else None
    return made.aggregate(given, [1.0] * len(given), distances).numpy()


def drawn(count, seed, values=3, numbers=2):
    """Gives gradients of few whole numbers, so that there are ties, and every sum is exact."""
    return np.random.default_rng(seed).integers(-values, values + 1, (count, numbers)).astype(float)


@pytest.mark.parametrize("above", [0, 1, 4])
@pytest.mark.parametrize("strength", [0, 1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_drawn_gradients_with_ties(name, strength, above):
    """From as few gradients as may be; bit for bit."""
    rule, key, least = RULES[name]
    ties, count = 0, 2 * strength + least + above
    for seed in range(60):
        gradients = drawn(count, seed, values=1 + seed % 3)
        ties += len(np.unique(gradients, axis=0)) < len(gradients)
        expected = rule(gradients, **{key: strength})
        np.testing.assert_array_equal(found_by(spec_of(name, strength), gradients), expected)
    assert ties > 0 or count == 1


@pytest.mark.parametrize(("count", "f", "m"), [(7, 2, 3), (7, 2, 1), (9, 2, 2), (5, 0, 3)])
def test_of_equal_scores_as_many_are_taken_as_were_asked_for(count, f, m):
    for seed in range(60):
        gradients = drawn(count, seed, values=1)
        expected = multi_krum(gradients, f, m)
        np.testing.assert_array_equal(found_by(spec_of("multi_krum", f, m=m), gradients), expected)


@pytest.mark.parametrize(
    ("name", "strength", "workers"),
    [
        ("krum", 1, 5),
        ("krum", 2, 8),
        ("multi_krum", 1, 6),
        ("trimmed_mean", 2, 5),
        ("trimmed_mean", 1, 6),
        ("coordinate_median", 2, 5),
        ("coordinate_median", 1, 6),
    ],
)
def test_whole_runs(name, strength, workers):
    """Each of two servers has a shard; Krum's distances are those of whole gradients all the same."""
    spec = f"parameter_server(servers=2, consistency=synchronous, aggregator={spec_of(name, strength)})"
    job = make_job(
        spec,
        workers,
        dtype=torch.float64,
        dataset=blobs(train=4 * workers * 6),
        optimizer="sgd(lr=0.05, momentum=0.8)",
    )
    reference = Workers(job, 2)
    w = nn.Parameter(reference.start.clone())
    optimizer = job.learning.optimizer.create([w])
    rule, key, _ = RULES[name]
    for step in range(12):
        reference.copies = [w.detach().clone() for _ in range(workers)]
        gradients = np.stack([reference.gradient(worker, step).numpy() for worker in range(workers)])
        w.grad = torch.tensor(rule(gradients, **{key: strength}))
        optimizer.param_groups[0]["lr"] = reference.rate(step)
        optimizer.step()
    found = vector_of(simulated(job, ConstantCluster(step_s=uneven)).models[0])
    torch.testing.assert_close(found, w.detach(), rtol=1e-12, atol=1e-14)
    assert (reference.start - found).abs().max() > 0.02
