"""Synchronous strategies are one large batch, and are each other."""

from math import inf

import pytest
import torch

from conformance.jobs import (
    UNEVEN,
    agreeing,
    blobs,
    make_job,
    plain_alone,
    plain_loop,
    plainly,
    played,
    simulated,
    uneven,
    vector_of,
)
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

UNBOUNDED = ConstantCluster(step_s=uneven, bandwidth_bytes_per_s=inf)
RAGGED = {  # workers: images of which the last step of an epoch takes less than it could
    2: 53,  # 5 in the last step of 8: 3 and 2
    3: 53,  # 5 in the last step of 12: 2, 2, 1
    4: 50,  # 2 in the last step of 16: 1, 1, and two empty batches
}
ROUNDED = "synchronous(transfer=bfloat16)"  # to 8 bits: its bounds are those of its own tests
LOSSY = "compress="  # likewise: what arrives later, or not at all
CASES = [
    (spec, workers)
    for workers in RAGGED
    for spec in agreeing(workers)
    if spec in plain_alone() and spec != ROUNDED and LOSSY not in spec
]


@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)", "tf1_rmsprop(momentum=0.9)"])
@pytest.mark.parametrize(("spec", "workers"), CASES)
def test_n_workers_are_one_worker_with_a_batch_n_times_as_large(spec, workers, optimizer):
    data = blobs(train=RAGGED[workers])
    job = make_job(spec, workers, dataset=data, dtype=torch.float64, optimizer=optimizer)
    expected = plainly(workers, train=RAGGED[workers], dtype=torch.float64, optimizer=optimizer)
    for model in simulated(job, UNEVEN).models:
        torch.testing.assert_close(vector_of(model), expected, **REORDERED)


@pytest.mark.parametrize(
    "compressor", ["top_k(density=1.0, dense_below=0)", "random_k(density=1.0, dense_below=0)"]
)
@pytest.mark.parametrize("workers", RAGGED)
def test_a_compressor_that_leaves_nothing_out_changes_nothing(workers, compressor):
    plain = played("synchronous(collective=direct)", workers, train=RAGGED[workers])
    whole = played(f"synchronous(compress={compressor})", workers, train=RAGGED[workers])
    if "top_k" in compressor or workers == 2:
        assert whole.sha256 == plain.sha256
    else:  # added up by another collective's order
        torch.testing.assert_close(
            vector_of(whole.models[0]), vector_of(plain.models[0]), rtol=1e-5, atol=1e-6
        )


def test_an_unweighted_mean_would_be_seen():
    """The ragged step is what tells a weighted mean from a mean of means, so it must matter."""
    job = make_job("synchronous", 3, dtype=torch.float64)
    dropped = make_job("synchronous", 3, dtype=torch.float64, dataset=blobs(train=48))
    ragged, full = (vector_of(plain_loop(each, together=3)) for each in (job, dropped))
    assert (ragged - full).abs().max() > 1e-3


@pytest.mark.parametrize("batch_size", [4, 5, 7])  # of these, only fourths have exact weights in binary
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_the_synchronous_server_has_the_bits_of_all_reduce(servers, workers, dtype, batch_size):
    shared = {"dtype": dtype, "batch_size": batch_size, "optimizer": "sgd(weight_decay=0.001)"}
    reduced = played("synchronous", workers, **shared)
    spec = f"parameter_server(servers={servers}, consistency=synchronous)"
    served = played(spec, workers, **shared)
    assert served.sha256 == reduced.sha256


@pytest.mark.parametrize("batch_size", [4, 5])
@pytest.mark.parametrize("consistency", ["asynchronous", "synchronous"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_mixed_with_one_group_has_the_bits_of_all_reduce(workers, consistency, batch_size):
    reduced = played("synchronous", workers, batch_size=batch_size)
    spec = f"mixed(replicas={workers}, servers=2, consistency={consistency})"
    grouped = simulated(make_job(spec, workers, batch_size=batch_size), UNEVEN)
    assert grouped.sha256 == reduced.sha256


@pytest.mark.parametrize("servers", [1, 2])
def test_mixed_with_one_replica_has_the_trace_of_the_asynchronous_server(servers):
    specs = (f"parameter_server(servers={servers})", f"mixed(replicas=1, servers={servers})")
    jobs = [make_job(spec, 3) for spec in specs]
    alone, grouped = (simulated(job, UNEVEN) for job in jobs)
    for figure in ("parameters_sha256", "staleness", "test_loss", "bytes_sent_per_step"):
        assert grouped.result[figure] == alone.result[figure], figure
    assert alone.result["staleness"]["max"] > 0
    # Who hears of buckets sleeps for each, the other for all at once: sums of the same times, in another order. Reports
    # hold them as text, a few bytes longer or shorter by their last digits: nanoseconds, and none on unbounded links.
    assert grouped.result["seconds"] == pytest.approx(alone.result["seconds"], abs=1e-8)
    alone_s, grouped_s = (simulated(job, UNBOUNDED).result["seconds"] for job in jobs)
    assert grouped_s == pytest.approx(alone_s, rel=1e-12)
