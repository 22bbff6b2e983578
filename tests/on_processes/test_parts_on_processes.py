"""Pushes and answers in parts over real links have the bits of the simulation."""

from functools import partial

import pytest

from conformance.jobs import make_job, result_of, simulated
from equivalence.test_overlapped_servers import SLOW, wide
from polyrhythm.launch.children import run_local
from polyrhythm.training.flat_parameters import FlatParameters

CASES = [
    ("parameter_server(consistency=synchronous, servers=2, replicas=2)", 2),
    ("hierarchical(groups=2, servers=2)", 3),
    ("parameter_server(consistency=synchronous, servers=2, compress=top_k(density=0.2, dense_below=0))", 2),
]


@pytest.mark.parametrize(("spec", "workers"), CASES)
def test_every_kind_of_server_that_is_sent_parts(spec, workers, monkeypatch):
    buckets = partial(FlatParameters, bucket_bytes=256)
    monkeypatch.setattr("polyrhythm.roles.replica.FlatParameters", buckets)
    job = make_job(spec, workers, model=wide, optimizer="sgd(lr=0.05, momentum=0)", batch_size=5)
    events = []
    run_local(job, events.append, threads=1)
    assert result_of(events)["parameters_sha256"] == simulated(job, SLOW).sha256
