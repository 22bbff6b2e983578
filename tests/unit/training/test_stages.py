"""Learning rates that fall toward the pixels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.models.fine_tuning import graded, stages


def _network() -> nn.Module:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    return nn.Sequential(nn.Linear(2, 3), inner, nn.Tanh(), nn.Linear(3, 2))


def test_stages_are_children_and_rows_of_them() -> None:
    assert [len(part) for part in stages(_network())] == [2, 2, 4, 2]


def test_rates_fall_by_the_decay() -> None:
    groups = graded(_network(), 0.1, 0.5)
    assert [group["lr"] for group in groups] == pytest.approx([0.0125, 0.025, 0.05, 0.1])


def test_a_frozen_stage_is_passed_over_and_a_tied_one_counted_once() -> None:
    network = _network()
    network[0].requires_grad_(False)
    network[1][2][1].weight = network[1][0].weight
    groups = graded(network, 1.0, 0.5)
    assert [len(group["params"]) for group in groups] == [2, 3, 2]
    everything = [id(each) for group in groups for each in group["params"]]
    assert len(set(everything)) == len(everything)


def test_without_decay_the_parameters_are_given_as_they_are() -> None:
    network = _network()
    assert all(a is b for a, b in zip(graded(network, 1.0, 1.0), network.parameters(), strict=True))


def test_parameters_of_the_network_itself_learn_slowest() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.out = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)

    owner = Owner()
    groups = graded(owner, 1.0, 0.5)
    assert groups[0]["params"][0] is owner.scale
    assert [group["lr"] for group in groups] == [0.5, 1.0]
