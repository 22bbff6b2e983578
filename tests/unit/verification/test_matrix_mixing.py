"""What those bring who begin anew, where some have just come, or have not taken the point before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.topologies.one_peer_exponential import OnePeerExponential
from polyrhythm.verification.gossip import MatrixMixing
from polyrhythm.verification.invariant import Conditions, Regrouped, Violation

GRADIENTS = torch.tensor([[4.0, 0.0], [0.0, 16.0], [2.0, 6.0]])
"""Of each of three workers, at all steps; all begin at the origin."""
FIRST, SECOND = {0: 0, 1: 1, 2: 0}, {0: 1, 1: 1, 2: 0}
"""Worker 1 is lost first, then worker 0; both have successors."""


def gradient(worker: int, step: int) -> Tensor:
    return GRADIENTS[worker]


@pytest.fixture
def mixed() -> MatrixMixing:
    conditions = Conditions(roles=roles_in_order(3, 0), numbers=2, gradient=gradient, steps=8)
    return MatrixMixing(conditions, OnePeerExponential(), lambda workers: None, gradient_first=True)


def anew(rank: int, members: dict[int, int], point: Tensor) -> Regrouped:
    return Regrouped(time_s=0.0, rank=rank, vector=point, members=members, steps=dict.fromkeys(members, 0))


BOTH = -(GRADIENTS[0] + GRADIENTS[2]) / 2
"""The mean of workers 0 and 2, which have learned in the step that broke."""


def test_a_successor_that_has_not_taken_a_point_may_bring_nothing(mixed: MatrixMixing) -> None:
    mixed.regrouped(anew(0, FIRST, BOTH))  # and it dies; no other has heard that all had the point
    mixed.regrouped(anew(0, SECOND, -GRADIENTS[2]))
    mixed.regrouped(anew(1, SECOND, -GRADIENTS[2]))
    with pytest.raises(Violation, match="expected the point at which the others begin"):
        mixed.regrouped(anew(2, SECOND, BOTH))


def test_or_has_taken_it_unseen(mixed: MatrixMixing) -> None:
    mixed.regrouped(anew(0, FIRST, BOTH))
    mixed.regrouped(anew(0, SECOND, BOTH))
    with pytest.raises(Violation, match="expected the point at which the others begin"):
        mixed.regrouped(anew(1, SECOND, -GRADIENTS[2]))


def test_who_has_taken_it_brings_it(mixed: MatrixMixing) -> None:
    for rank in (0, 1):
        mixed.regrouped(anew(rank, FIRST, BOTH))
    with pytest.raises(Violation, match="expected the mean of the remaining workers"):
        mixed.regrouped(anew(0, SECOND, -GRADIENTS[2]))


def test_what_nobody_holds_is_nobodys_mean(mixed: MatrixMixing) -> None:
    mixed.regrouped(anew(0, FIRST, BOTH))
    with pytest.raises(Violation, match="expected the mean of the remaining workers"):
        mixed.regrouped(anew(0, SECOND, -2 * GRADIENTS[2]))


def test_where_nobody_has_anything_one_begins_with_what_was_handed_on(mixed: MatrixMixing) -> None:
    mixed.regrouped(anew(0, FIRST, BOTH))
    mixed.regrouped(anew(0, {0: 1, 1: 1, 2: 1}, -GRADIENTS[2]))
    with pytest.raises(Violation, match="expected the mean of the remaining workers"):
        mixed.regrouped(anew(0, {0: 2, 1: 2, 2: 2}, BOTH + 1))
