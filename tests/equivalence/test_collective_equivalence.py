"""Synchronous training is the same whichever collective adds up: to rounding, and bit for bit where sums are exact."""

import pytest
import torch

from conformance.jobs import UNEVEN, make_job, plainly, played, simulated, vector_of
from tolerances import REORDERED
from unit.communication.collectives.groups import SPECS, collective, fractions, reduced, uncontended

KINDS = [*SPECS, "library", "auto"]


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("spec", KINDS)
def test_every_collective_makes_n_workers_one(spec, workers):
    job = make_job(f"synchronous(collective={spec})", workers, dtype=torch.float64)
    expected = plainly(workers, dtype=torch.float64)
    for model in simulated(job, UNEVEN).models:
        torch.testing.assert_close(vector_of(model), expected, **REORDERED)


@pytest.mark.parametrize("spec", KINDS)
def test_mixed_averages_inside_its_groups_by_any_collective(spec):
    shared = {"dtype": torch.float64, "optimizer": "sgd(momentum=0.9)"}
    one = simulated(
        make_job(
            f"mixed(replicas=3, consistency=synchronous, inside=synchronous(collective={spec}))", 6, **shared
        ),
        UNEVEN,
    )
    other = played("mixed(replicas=3, consistency=synchronous)", 6, **shared)
    torch.testing.assert_close(vector_of(one.models[0]), vector_of(other.models[0]), **REORDERED)


def test_direct_has_the_bits_of_the_simulated_library():
    ours, library = (
        simulated(make_job(f"synchronous(collective={kind})", 4), UNEVEN) for kind in ("direct", "library")
    )
    assert ours.sha256 == library.sha256


@pytest.mark.parametrize("spec", SPECS)
def test_one_worker_and_two_have_the_bits_of_any_other_collective(spec):
    for workers in (1, 2):  # two summands commute
        one = simulated(make_job(f"synchronous(collective={spec})", workers), UNEVEN)
        assert one.sha256 == played("synchronous", workers).sha256


def test_another_order_would_be_seen():
    """The bits of sums of fractions depend on their order, so equal bits in other tests mean something."""
    sums = {tuple(reduced(uncontended(6), collective(spec), fractions(6, 50))[0].tolist()) for spec in SPECS}
    assert len(sums) > 2
