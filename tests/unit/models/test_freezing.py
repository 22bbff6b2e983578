"""Frozen parts of networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.models.fine_tuning import freeze, head_of


def _network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    return nn.Sequential(body, nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_a_frozen_body_leaves_the_head() -> None:
    network = _network()
    assert head_of(network) == "2"
    freeze(network, "body")
    assert [name for name, each in network.named_parameters() if each.requires_grad] == ["2.weight", "2.bias"]


def test_statistics_of_frozen_norms_stand_still_in_training() -> None:
    network = _network()
    freeze(network, "0")
    images = torch.randn(6, 1, 4, 4) + 3
    network.train()
    found = network(images)
    assert torch.equal(network[0][1].running_mean, torch.zeros(2))
    assert not torch.equal(network[1].running_mean, torch.zeros(8))  # not frozen
    network.eval()
    network[1].train()
    torch.testing.assert_close(found, network(images))


def test_parts_by_name() -> None:
    network = _network()
    freeze(network, "0.0, 1.bias")
    frozen = {name for name, each in network.named_parameters() if not each.requires_grad}
    assert frozen == {"0.0.weight", "0.0.bias", "1.bias"}
    freeze(network, "none")


def test_batch_norms_alone() -> None:
    network = _network()
    freeze(network, "norms")
    frozen = {name for name, each in network.named_parameters() if not each.requires_grad}
    assert frozen == {"0.1.weight", "0.1.bias", "1.weight", "1.bias"}
    network.train()(torch.randn(6, 1, 4, 4) + 3)
    assert torch.equal(network[1].running_mean, torch.zeros(8))
    without = nn.Sequential(nn.Linear(2, 2))
    freeze(without, "norms")
    assert all(each.requires_grad for each in without.parameters())


def test_what_cannot_be_frozen_is_refused() -> None:
    with pytest.raises(RequestError, match="unknown part of the model 'features'"):
        freeze(_network(), "features")
    with pytest.raises(RequestError, match="leaves nothing to train"):
        freeze(_network(), "0,1,2")
    with pytest.raises(RequestError, match="has no head"):
        freeze(nn.Flatten(), "body")
