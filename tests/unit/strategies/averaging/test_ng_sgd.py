"""NG-SGD: what it preconditions, and that without a Fisher matrix it is local SGD."""

from __future__ import annotations

import pytest
import torch

from conformance.jobs import make_job, simulated, uneven, vector_of
from polyrhythm.simulation.run import ConstantCluster

UNEVEN = ConstantCluster(step_s=uneven)


def trained(spec, optimizer, workers=3):
    return simulated(make_job(spec, workers, optimizer=optimizer), UNEVEN)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0, weight_decay=0.01)", "adamw"])
def test_without_a_fisher_matrix_it_is_local_sgd_bit_for_bit(optimizer):
    natural, local = trained("ng_sgd(rank=0, steps=3)", optimizer), trained("local_sgd(steps=3)", optimizer)
    assert natural.sha256 == local.sha256
    assert trained("ng_sgd(rank=2, steps=3)", optimizer).sha256 != local.sha256


def test_it_preconditions_as_the_optimizer_of_that_name_does_under_local_sgd():
    ours = trained("ng_sgd(rank=2, steps=3, eta=0.2)", "sgd(lr=0.1)")
    assert ours.sha256 == trained("local_sgd(steps=3)", "ngsgd(lr=0.1, rank=2, eta=0.2)").sha256


def test_estimates_stay_each_workers_own_where_momentum_is_averaged():
    """The mean of two orthonormal bases is none."""
    averaged = trained("local_sgd(steps=3, optimizer_state=average)", "ngsgd(rank=2)")
    kept = trained("local_sgd(steps=3)", "ngsgd(rank=2)")
    assert averaged.sha256 != kept.sha256
    assert bool(torch.isfinite(vector_of(averaged.models[0])).all())
