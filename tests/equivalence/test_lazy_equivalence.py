"""Lazy update has the bits of the eager one."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from conformance.jobs import make_job, simulated, uneven, vector_of, with_batch_norm
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.flat_parameters import FlatParameters

SLOW = ConstantCluster(step_s=uneven, bandwidth_bytes_per_s=3e4)


CASES = [  # bytes of a bucket, options, workers, optimizer
    (16, "", 1, "sgd"),
    (16, "", 2, "adam(lr=0.01)"),
    (16, "", 3, "sgd"),
    (16, "(piece_bytes=32)", 2, "sgd"),
    (16, "(piece_bytes=32)", 3, "adam(lr=0.01)"),
    (16, "(piece_bytes=0)", 3, "adam(lr=0.01)"),
    (4 << 20, "", 3, "sgd"),
]


@pytest.mark.parametrize(("bucket_bytes", "options", "workers", "optimizer"), CASES)
def test_lazy_update_has_the_bits_of_the_eager_one(bucket_bytes, options, workers, optimizer, monkeypatch):
    _cut(monkeypatch, bucket_bytes)
    eager = simulated(make_job("synchronous", workers, optimizer=optimizer, batch_size=5), SLOW)
    lazy = simulated(make_job(f"lazy_synchronous{options}", workers, optimizer=optimizer, batch_size=5), SLOW)
    assert lazy.sha256 == eager.sha256
    for model in lazy.models:
        assert torch.equal(vector_of(model), vector_of(eager.models[0]))


@pytest.mark.parametrize("collective", ["ring", "rabenseifner", "auto"])
def test_uncut_it_has_them_with_every_collective(collective, monkeypatch):
    _cut(monkeypatch, 16)
    eager = simulated(make_job(f"synchronous(collective={collective})", 3), SLOW)
    lazy = simulated(make_job(f"lazy_synchronous(collective={collective}, piece_bytes=0)", 3), SLOW)
    assert lazy.sha256 == eager.sha256


def test_averaged_weights_are_those_of_whole_steps():
    eager, lazy = (
        simulated(make_job(spec, 2, model=with_batch_norm, weight_average=0.9), SLOW)
        for spec in ("synchronous", "lazy_synchronous")
    )
    assert lazy.result["test_loss"] == eager.result["test_loss"]


def test_a_resumed_run_may_wait_in_other_buckets(tmp_path, monkeypatch):
    job = make_job("lazy_synchronous", 2, optimizer="adam(lr=0.01)", folder=tmp_path)
    whole = simulated(replace(job, checkpointing=replace(job.checkpointing, folder=None)), SLOW)
    _cut(monkeypatch, 16)
    half = simulated(job, replace(SLOW, stop_at_s=0.1))
    assert half.result["epochs"] < 2
    monkeypatch.undo()
    assert (
        simulated(replace(job, checkpointing=replace(job.checkpointing, resume=True)), SLOW).sha256
        == whole.sha256
    )


def _cut(monkeypatch, bucket_bytes):
    cut = partial(FlatParameters, bucket_bytes=bucket_bytes)
    monkeypatch.setattr("polyrhythm.roles.replica.FlatParameters", cut)
