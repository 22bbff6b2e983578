"""What a network costs: against torch's own counter, published sizes, and small networks counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.errors import RequestError
from polyrhythm.models import create_model
from polyrhythm.planning.analysis import LOSS, Analysis, analysis_of

PUBLISHED = {
    "alexnet": (224, 61_100_840, 0.71),
    "vgg16": (224, 138_357_544, 15.47),
    "resnet50": (224, 25_557_032, 4.09),
    "inception_v3": (299, 27_161_264 - 3_326_696, 5.71),  # without its auxiliary head
}
"""Pixels a side, and torchvision's parameters and 10⁹ multiply-adds an image."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_multiply_adds_and_parameters_are_torch_s(name: str) -> None:
    side, parameters, billions = PUBLISHED[name]
    shape = (3, side, side)
    with torch.device("meta"):
        model = create_model(name, classes=1000, image_shape=shape)
    found = analysis_of(model, shape, 2)
    images = torch.empty(2, *shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        output = model(images)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert 2 * found.multiply_adds == forward
    assert 2 * (found.multiply_adds + found.backward_multiply_adds) == counter.get_total_flops()
    assert found.parameters == parameters
    assert found.multiply_adds / 2e9 == pytest.approx(billions, abs=0.006)
    assert sum(layer.multiply_adds for layer in found.layers) == found.multiply_adds
    assert sum(layer.parameters for layer in found.layers) == parameters


class Branches(nn.Module):
    """A wide and a deep branch of one input, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.wide = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        out: Tensor = self.deep(flat) + self.wide(flat)
        return out


def analyzed(model: nn.Module, shape: tuple[int, int, int], batch: int) -> Analysis:
    return analysis_of(model.to("meta"), shape, batch)


def test_depth_is_that_of_the_longest_branch() -> None:
    found = analyzed(Branches(), (1, 4, 4), 3)
    linear = 1 + 4 + 1  # products, a sum of 16, the bias
    assert found.depth == linear + 1 + linear + 1
    assert found.multiply_adds == 3 * (16 * 16 + 16 * 4 + 16 * 4)
    by_name = {layer.name: layer for layer in found.layers}
    assert by_name["wide"].depth == linear
    assert (by_name[""].depth, by_name[""].work) == (1, 12)  # the sum of both
    assert by_name[LOSS].work > 0


def test_activations_are_what_the_backward_pass_needs() -> None:
    """Two layers keep their inputs; tanh keeps its output, which is the second one's input."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    found = analyzed(model, (2, 2, 2), 5)
    kept = {layer.name: layer.saved_bytes for layer in found.layers}
    assert kept["1"] == 5 * 8 * 4
    assert kept["2"] == 5 * 32 * 4
    assert kept["3"] == 0
    assert found.training_bytes(1) == 3 * 4 * found.parameters + found.activation_bytes


def test_activations_grow_with_the_batch_and_parameters_do_not() -> None:
    one, four = (analyzed(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2), n) for n in (2, 8))
    assert four.multiply_adds == 4 * one.multiply_adds
    assert four.parameter_bytes == one.parameter_bytes
    # all but the scalar of the loss
    assert four.activation_bytes - 4 == pytest.approx(4 * (one.activation_bytes - 4), abs=16)


class Looks(nn.Module):
    """Looks at numbers, which a tensor of the meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        out: Tensor = self.layer(flat if flat.sum().item() >= 0 else -flat)
        return out


def test_a_network_that_looks_at_numbers_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot be analyzed at batch 2"):
        analyzed(Looks(), (1, 2, 2), 2)
