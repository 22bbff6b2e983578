"""Servers in two levels against those in one, and against mixed mode."""

import pytest
import torch

from conformance.jobs import make_job, simulated, uneven, vector_of
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster

UNEVEN = ConstantCluster(step_s=uneven)
SERVED = "parameter_server(servers=2, consistency=synchronous)"


@pytest.mark.parametrize("groups", [1, 5])
def test_groups_of_all_or_of_one_are_the_synchronous_server_bit_for_bit(groups):
    digests = [
        simulated(make_job(spec, 5, optimizer="adam"), UNEVEN).sha256
        for spec in (f"hierarchical(groups={groups}, servers=2)", SERVED)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_means_of_uneven_groups_are_weighted_with_their_samples(groups):
    """53 images of 5 workers: groups of 1 to 3 workers, and a last step of 13 images."""
    ours, plain = (
        vector_of(simulated(make_job(spec, 5, dtype=torch.float64), UNEVEN).models[0])
        for spec in (f"hierarchical(groups={groups})", "synchronous")
    )
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-13)


def test_asynchronous_between_groups_is_mixed_mode():
    """Steps so uneven that an answer's longer way changes nobody's turn."""
    pace = ConstantCluster(step_s=lambda worker: 0.01 if worker < 2 else 0.0137, latency_s=1e-6)
    ours, mixed = (
        simulated(make_job(spec, 4, dtype=torch.float64), pace)
        for spec in ("hierarchical(consistency=asynchronous)", "mixed(replicas=2)")
    )
    torch.testing.assert_close(vector_of(ours.models[0]), vector_of(mixed.models[0]), rtol=0, atol=1e-13)
    assert ours.result["staleness"] == mixed.result["staleness"]
    assert ours.result["staleness"]["max"] > 0


def test_the_roots_get_one_gradient_a_group():
    """With G groups of N workers: 2 (N + G) messages of M bytes a step."""
    job = make_job("hierarchical(groups=3)", 6)
    message = 103 * 4 + 64
    assert simulated(job).result["bytes_sent_per_step"] == 2 * (6 + 3) * message / 6


def test_what_a_group_cannot_do_is_refused():
    with pytest.raises(RequestError, match="leave cached_reads out"):
        make_job("hierarchical(consistency=bounded_staleness(cached_reads=True))", 4).strategy.check(4)
