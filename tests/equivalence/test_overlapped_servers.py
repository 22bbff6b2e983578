"""Pushes and pulls that overlap with computing have the bits of those that do not."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from conformance.jobs import make_job, simulated, uneven, vector_of, with_batch_norm
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.flat_parameters import FlatParameters

SLOW = ConstantCluster(step_s=uneven, bandwidth_bytes_per_s=1.5e6)
CASES = [  # strategy, its options, workers, optimizer
    ("parameter_server", "consistency=synchronous", 2, "sgd"),
    ("parameter_server", "consistency=synchronous, servers=2", 3, "adam(lr=0.01)"),
    ("parameter_server", "consistency=synchronous, servers=3", 2, "sgd"),
    ("parameter_server", "consistency=synchronous, aggregator=coordinate_median", 3, "sgd"),
    ("parameter_server", "consistency=synchronous, aggregator=krum(f=0), servers=2", 3, "sgd"),
    ("backup_workers", "spare=0, servers=2", 3, "sgd"),
    ("ssp", "s=0", 2, "adam(lr=0.01)"),
    ("parameter_server", "consistency=synchronous, servers=2, replicas=2", 3, "adam(lr=0.01)"),
    ("parameter_server", "consistency=synchronous, servers=3, replicas=2", 2, "sgd"),
    ("hierarchical", "groups=2, servers=2", 4, "adam(lr=0.01)"),
    ("hierarchical", "groups=2, servers=1", 3, "sgd"),
    ("hierarchical", "groups=1, servers=3", 2, "sgd"),
]


def wide():
    """Makes a network of layers that weigh more than what is said of them: 3,715 parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 48),
        nn.Tanh(),
        nn.Linear(48, 48),
        nn.Tanh(),
        nn.Linear(48, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr("polyrhythm.roles.replica.FlatParameters", partial(FlatParameters, bucket_bytes=256))


@pytest.mark.parametrize(("name", "options", "workers", "optimizer"), CASES)
def test_what_goes_in_step_has_the_same_bits_in_less_time(name, options, workers, optimizer):
    whole, parts = (
        simulated(
            make_job(
                f"{name}({options}, overlap={overlap})",
                workers,
                model=wide,
                optimizer=optimizer,
                batch_size=5,
            ),
            SLOW,
        )
        for overlap in ("false", "true")
    )
    assert parts.sha256 == whole.sha256
    assert parts.result["staleness"] == whole.result["staleness"]
    assert parts.result["seconds"] < 0.95 * whole.result["seconds"]
    for model in parts.models[1:]:
        assert torch.equal(vector_of(model), vector_of(parts.models[1]))


@pytest.mark.parametrize(
    "spec",
    [
        "parameter_server(servers=2{})",
        "parameter_server(merge=staleness_aware{})",
        "dc_asgd(servers=2{})",
        "softsync(n=2{})",
        "ssp(s=2{})",
        "parameter_server(consistency=bounded_staleness(s=2, cached_reads=true){})",
        "backup_workers(spare=1, servers=2{})",
    ],
)
def test_each_at_its_own_pace_takes_the_same_steps_in_less_time(spec):
    whole, parts = (
        simulated(make_job(spec.format(f", overlap={overlap}"), 3, model=wide, batch_size=5), SLOW)
        for overlap in ("false", "true")
    )
    assert parts.result["steps"] == whole.result["steps"]
    assert parts.result["seconds"] < 0.97 * whole.result["seconds"]
    assert parts.result["test_loss"] < 2 * whole.result["test_loss"]


def test_averaged_weights_are_those_of_whole_steps():
    whole, parts = (
        simulated(make_job(spec, 2, model=with_batch_norm, weight_average=0.9), SLOW)
        for spec in (
            "parameter_server(consistency=synchronous, overlap=false)",
            "parameter_server(consistency=synchronous)",
        )
    )
    assert parts.result["test_loss"] == whole.result["test_loss"]


@pytest.mark.parametrize("then", ["true", "false"])
def test_a_resumed_run_may_overlap_or_not(then, tmp_path):
    options = "consistency=synchronous, servers=2, overlap={}"
    job = make_job(
        f"parameter_server({options.format('true')})", 2, optimizer="adam(lr=0.01)", folder=tmp_path
    )
    whole = simulated(replace(job, checkpointing=replace(job.checkpointing, folder=None)), SLOW)
    half = simulated(job, replace(SLOW, stop_at_s=0.15))
    assert half.result["epochs"] < 2
    other = make_job(
        f"parameter_server({options.format(then)})", 2, optimizer="adam(lr=0.01)", folder=tmp_path
    )
    again = replace(other, checkpointing=replace(job.checkpointing, resume=True))
    assert simulated(again, SLOW).sha256 == whole.sha256


@pytest.mark.parametrize(
    "compressor",
    [
        "top_k(density=0.2",
        "random_k(density=0.2, scaled=true, feedback=false",
        "qsgd(levels=7",
        "terngrad(feedback=false",
        "one_bit(",
        "power_sgd(rank=1",
        "adacomp(",
        "dgc(density=0.2",
        "float16(",
    ],
)
@pytest.mark.parametrize("servers", [1, 2])
def test_layers_that_are_compressed_one_by_one_have_the_bits_of_all_together(compressor, servers):
    compress = f"{compressor}, dense_below=0)".replace("(,", "(")
    whole, parts = (
        simulated(
            make_job(
                f"parameter_server(consistency=synchronous, servers={servers}, compress={compress}, overlap={overlap})",
                2,
                model=wide,
                optimizer="sgd(lr=0.05, momentum=0)",
                batch_size=5,
            ),
            SLOW,
        )
        for overlap in ("false", "true")
    )
    assert parts.sha256 == whole.sha256
    assert parts.result["seconds"] < 0.99 * whole.result["seconds"]


@pytest.mark.parametrize("then", ["true", "false"])
def test_a_compressed_run_goes_on_overlapped_or_not(then, tmp_path):
    options = "consistency=synchronous, servers=2, compress=dgc(density=0.1), overlap={}"
    sgd = "sgd(lr=0.05, momentum=0)"
    job = make_job(
        f"parameter_server({options.format('true')})", 2, model=wide, optimizer=sgd, folder=tmp_path
    )
    whole = simulated(replace(job, checkpointing=replace(job.checkpointing, folder=None)), SLOW)
    half = simulated(job, replace(SLOW, stop_at_s=0.15))
    assert half.result["epochs"] < 2
    other = make_job(
        f"parameter_server({options.format(then)})", 2, model=wide, optimizer=sgd, folder=tmp_path
    )
    again = replace(other, checkpointing=replace(job.checkpointing, resume=True))
    assert simulated(again, SLOW).sha256 == whole.sha256
