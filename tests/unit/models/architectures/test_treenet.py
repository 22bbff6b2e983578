"""Trees of networks: trunk, branches and their average."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.training.loss import Targets
from polyrhythm.training.losses.cross_entropy import CrossEntropy

SHAPE = (1, 8, 8)


def _tree(spec: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model(spec, classes=5, image_shape=SHAPE).double()


def _images() -> torch.Tensor:
    return torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_it_tells_the_mean_of_the_branches_probabilities() -> None:
    tree, images = _tree("treenet(base=lenet5, branches=3, split=2)"), _images()
    scores = tree.train()(images)
    assert scores.shape == (4, 3, 5)
    found = tree.eval()(images)
    torch.testing.assert_close(found.exp(), scores.softmax(2).mean(1))
    torch.testing.assert_close(found.exp().sum(1), torch.ones(4, dtype=torch.float64))


def test_nothing_shared_is_independent_networks() -> None:
    tree, images = _tree("treenet(base='mlp(hidden=[7])', branches=2, split=0)"), _images()
    assert not list(tree.trunk.parameters())
    labels = torch.tensor([0, 1, 2, 3])
    CrossEntropy()(tree.train()(images), labels, Targets()).backward()
    for branch in tree.branches:
        grown = [parameter.grad.clone() for parameter in branch.parameters()]
        branch.zero_grad()
        functional.cross_entropy(branch(images), labels).backward()
        for alone, together in zip(branch.parameters(), grown, strict=True):
            torch.testing.assert_close(alone.grad, together)


def test_all_shared_is_one_network() -> None:
    tree, images = _tree("treenet(base='mlp(hidden=[7])', branches=3, split=2)"), _images()
    assert not list(tree.branches.parameters())
    torch.testing.assert_close(tree.eval()(images), tree.trunk(images).log_softmax(1))


def test_the_trunks_gradient_is_the_sum_of_the_branches() -> None:
    tree, images = _tree("treenet(base=lenet5, branches=3, split=1)").train(), _images()
    labels = torch.tensor([4, 1, 2, 3])
    CrossEntropy()(tree(images), labels, Targets()).backward()
    found = [parameter.grad.clone() for parameter in tree.trunk.parameters()]
    parts = []
    for branch in range(3):
        tree.zero_grad()
        functional.cross_entropy(tree(images)[:, branch], labels).backward()
        parts.append([parameter.grad.clone() for parameter in tree.trunk.parameters()])
        others = [other for number, other in enumerate(tree.branches) if number != branch]
        assert all(not parameter.grad.any() for other in others for parameter in other.parameters())
    for number, whole in enumerate(found):
        torch.testing.assert_close(whole, sum(part[number] for part in parts))


def test_branches_begin_differently() -> None:
    tree = _tree("treenet(branches=2, split=1)")
    first, second = (list(branch.parameters()) for branch in tree.branches)
    assert not torch.equal(first[0], second[0])


def test_what_cannot_be_branched_is_refused() -> None:
    with pytest.raises(RequestError, match="mlp has 2 layers with weights, so split=3 is too many"):
        _tree("treenet(base=mlp, split=3)")
    with pytest.raises(RequestError, match="cannot branch treenet"):
        _tree("treenet(base=treenet)")
    with pytest.raises(RequestError, match="unknown model"):
        _tree("treenet(base=nothing)")
