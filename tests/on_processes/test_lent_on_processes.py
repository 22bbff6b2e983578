"""Gradients and parameters that are lent on one host, and not copied, have the bits of the simulation."""

import multiprocessing
from functools import partial

import pytest

from conformance.jobs import make_job, result_of, simulated
from equivalence.test_overlapped_servers import SLOW, wide
from polyrhythm.communication.transports.shared_memory import links
from polyrhythm.launch.children import run_local
from polyrhythm.strategies.parameter_server.serving import push_pull, shard
from polyrhythm.training.flat_parameters import FlatParameters

CASES = [
    ("parameter_server(consistency=synchronous, overlap=false)", 2),
    ("parameter_server(consistency=synchronous, servers=2)", 2),
    ("parameter_server", 1),
]


@pytest.mark.parametrize(("spec", "workers"), CASES)
def test_the_smallest_vectors_are_lent(spec, workers, monkeypatch):
    buckets = partial(FlatParameters, bucket_bytes=256)
    monkeypatch.setattr("polyrhythm.roles.replica.FlatParameters", buckets)
    monkeypatch.setattr(links, "MOST_INLINE_BYTES", 0)
    lent, lend = multiprocessing.Value("i"), links.LendingSlots.lend_segment

    def counted(slots, segment):
        with lent:
            lent.value += 1
        return lend(slots, segment)

    monkeypatch.setattr(links.LendingSlots, "lend_segment", counted)
    monkeypatch.setattr(shard, "_LEAST_LENT_BYTES", 1)
    monkeypatch.setattr(push_pull, "_LEAST_LENT_BYTES", 1)
    job = make_job(spec, workers, model=wide, optimizer="sgd(lr=0.05, momentum=0.9)", batch_size=5)
    events = []
    run_local(job, events.append, threads=1)  # as in the simulation: a worker alone would get two
    assert result_of(events)["parameters_sha256"] == simulated(job, SLOW).sha256
    assert lent.value >= 2 * workers * job.strategy.servers * result_of(events)["steps"]
