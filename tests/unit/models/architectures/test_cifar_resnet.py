"""Residual networks for small pictures, against the paper's counts and the same network written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, linear

from polyrhythm.errors import RequestError
from polyrhythm.evaluation.dense import to_dense
from polyrhythm.models.architectures.cifar_resnet import CifarResNet
from polyrhythm.specs import build

SHAPE = (3, 32, 32)


# table 6 of the paper has 0.27, 0.46, 0.66, 0.85 and 1.7 million
@pytest.mark.parametrize(
    ("depth", "weights"), [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)]
)
def test_it_has_as_many_weights_as_the_papers(depth: int, weights: int) -> None:
    model = CifarResNet(depth=depth).create(10, SHAPE)
    assert sum(each.numel() for each in model.parameters()) == weights


def _written_out(state: dict[str, Tensor], images: Tensor, blocks: int) -> Tensor:
    def normed(maps: Tensor, name: str) -> Tensor:
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return batch_norm(maps, mean, var, state[f"{name}.weight"], state[f"{name}.bias"])

    maps = normed(conv2d(images, state["0.weight"], padding=1), "1").relu()
    for place in range(3 * blocks):
        name, halves = f"{3 + place}", place > 0 and place % blocks == 0
        shortcut = maps
        if halves:
            shortcut = torch.cat([maps[:, :, ::2, ::2], torch.zeros_like(maps[:, :, ::2, ::2])], 1)
        maps = normed(
            conv2d(maps, state[f"{name}.conv1.weight"], stride=2 if halves else 1, padding=1), f"{name}.norm1"
        )
        maps = normed(conv2d(maps.relu(), state[f"{name}.conv2.weight"], padding=1), f"{name}.norm2")
        maps = (maps + shortcut).relu()
    last = 3 + 3 * blocks + 2
    return linear(maps.mean((2, 3)), state[f"{last}.weight"], state[f"{last}.bias"])


def test_it_computes_what_the_paper_writes() -> None:
    torch.manual_seed(0)
    model = CifarResNet(depth=14, width=4).create(5, SHAPE).double()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
    images = torch.randn(3, *SHAPE, dtype=torch.float64)
    found = model.eval()(images)
    torch.testing.assert_close(found, _written_out(model.state_dict(), images, 2), rtol=1e-12, atol=1e-12)


def test_it_looks_at_larger_pictures_densely() -> None:
    torch.manual_seed(0)
    model = CifarResNet(depth=8, width=4).create(5, SHAPE).eval()
    assert to_dense(model, SHAPE)(torch.randn(2, 3, 48, 40)).shape == (2, 5)


def test_what_it_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match=r"depth.*6n \+ 2, such as 20"):
        build("model", "cifar_resnet(depth=18)", "polyrhythm.models.architectures")
    with pytest.raises(RequestError, match="3x32: both sides need 4 pixels"):
        CifarResNet().create(10, (3, 3, 32))
