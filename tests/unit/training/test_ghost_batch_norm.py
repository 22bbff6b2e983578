"""Ghost batch normalization, against plain layers of torch that see one slice after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from conformance.jobs import make_job, perceptron, simulated, with_batch_norm
from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.training.batch_norms.ghost import Ghost


class Activated(nn.BatchNorm2d):
    """Does more than to normalise, as layers of timm."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(images))


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), Activated(3)])
@pytest.mark.parametrize(("batch", "slices"), [(12, [4, 4, 4]), (10, [4, 3, 3]), (4, [4])])
def test_every_slice_is_normalized_by_itself(layer: nn.Module, batch: int, slices: list[int]) -> None:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(layer).double().train()
    ghost = Ghost(size=4).prepare(nn.Sequential(copy.deepcopy(layer).double())).train()
    weights = torch.randn_like(images)
    (ghost(images) * weights).sum().backward()
    found, images.grad = images.grad, None
    (torch.cat([plain(part) for part in images.split(slices)]) * weights).sum().backward()
    assert torch.equal(found, images.grad)
    for (name, one), other in zip(ghost[0].state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for one, other in zip(ghost.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.equal(ghost.eval()(images), plain.eval()(images))


def test_a_copy_is_of_its_own() -> None:
    model = Ghost(size=2).prepare(with_batch_norm()).train()
    other = copy.deepcopy(model)
    other(torch.randn(4, 1, 4, 4))
    assert model[1].num_batches_tracked == 0
    assert other[1].num_batches_tracked == 2
    assert list(model.state_dict()) == list(with_batch_norm().state_dict())


def test_of_a_run_only_slices_that_are_smaller_than_its_batches_matter() -> None:
    runs = {
        size: simulated(make_job("synchronous", 2, model=with_batch_norm, batch_norm=Ghost(size=size)))
        for size in (2, 4, 64)
    }
    plain = simulated(make_job("synchronous", 2, model=with_batch_norm))
    assert runs[4].sha256 == runs[64].sha256 == plain.sha256  # batches have 4 pictures
    assert runs[2].sha256 != plain.sha256


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match="has no batch normalization: leave batch_norm out"):
        Ghost().prepare(perceptron())
    with pytest.raises(RequestError, match="has no variance"):
        Ghost(size=1).prepare(with_batch_norm())
    with pytest.raises(RequestError, match="unknown batch norm 'gost': did you mean ghost"):
        build("batch norm", "gost", "polyrhythm.training.batch_norms")
