"""The bytes that a run counts are those that the strategy declares: payload, and 64 bytes of header a message.

Symbols: N workers, S servers, R replicas of a group, G groups, n parameters of e bytes, B buckets.
"""

from functools import partial

import pytest
import torch

from conformance.jobs import PARAMETERS, blobs, make_job, simulated, strategies, strategy, uneven
from polyrhythm.simulation.run import Surroundings
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.training.flat_parameters import TAIL, FlatParameters

HEADER = 64


def all_reduce(members, payload, buckets):
    """Direct reduce-scatter and all-gather: every rank sends 2(N-1) messages a bucket, 2M(N-1)/N bytes in the mean."""
    return 2 * (members - 1) * payload + 2 * members * (members - 1) * HEADER * buckets


def synchronous(strategy, workers, size, buckets):
    return all_reduce(workers, (PARAMETERS + TAIL) * size, buckets)


def lazy_synchronous(strategy, workers, size, buckets):
    times = 2 * buckets if buckets > 1 else 0
    return all_reduce(workers, (PARAMETERS + TAIL + times) * size, buckets)


def parameter_server(strategy, workers, size, buckets):
    return workers * 2 * (PARAMETERS * size + strategy.servers * HEADER)


def mixed(strategy, workers, size, buckets):
    whole = (PARAMETERS + TAIL) * size
    groups = [min(strategy.replicas, workers - first) for first in range(0, workers, strategy.replicas)]
    inside = sum(all_reduce(members, whole, buckets) + (members - 1) * (whole + HEADER) for members in groups)
    return inside + len(groups) * 2 * (PARAMETERS * size + strategy.servers * HEADER)


DECLARED = {
    "synchronous": synchronous,
    "lazy_synchronous": lazy_synchronous,
    "parameter_server": parameter_server,
    "mixed": mixed,
}
"""Bytes that all ranks together send while every worker takes one step."""


def test_every_strategy_declares_its_bytes():
    assert set(DECLARED) == {name for family in FAMILIES for name in choices(family)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", strategies())
def test_counted_bytes_are_the_declared_ones(spec, workers, dtype):
    result = simulated(make_job(spec, workers, dtype=dtype), Surroundings(step_s=uneven)).result
    declared = DECLARED[strategy(spec).name](strategy(spec), workers, dtype.itemsize, 1)
    assert result["bytes_sent_per_step"] == declared / workers


@pytest.mark.parametrize("spec", strategies())
def test_bytes_sent_in_the_background_of_the_backward_pass_count(spec, monkeypatch):
    monkeypatch.setattr("polyrhythm.roles.replica.FlatParameters", partial(FlatParameters, bucket_bytes=16))
    result = simulated(make_job(spec, 3), Surroundings(bandwidth_bytes_per_s=1e5)).result
    declared = DECLARED[strategy(spec).name](strategy(spec), 3, 4, 4)
    assert result["bytes_sent_per_step"] == declared / 3


@pytest.mark.parametrize("spec", strategies())
def test_the_length_of_the_run_does_not_change_the_bytes_of_a_step(spec):
    short, long = (
        simulated(make_job(spec, 3, epochs=epochs, dataset=blobs(train=24))).result["bytes_sent_per_step"]
        for epochs in (1, 4)
    )
    assert short == long
