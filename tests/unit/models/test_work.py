from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.training.model_sizes import work_of_parameters


def test_a_convolution_and_a_layer_by_hand() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * 4 * 4, 5),
    )
    before = {name: value.clone() for name, value in net.state_dict().items()}
    work = work_of_parameters(net, (1, 4, 4))
    convolution = 2 * (1 * 3 * 3) * 2 * (4 * 4)  # 2 operations for each of 9 weights, 2 channels, 16 places
    layer = 2 * 32 * 5
    assert work == pytest.approx(
        {
            "0.weight": convolution * 18 / 20,
            "0.bias": convolution * 2 / 20,
            "1.weight": 0,
            "1.bias": 0,
            "4.weight": layer * 160 / 165,
            "4.bias": layer * 5 / 165,
        }
    )
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(value.device.type == "cpu" for value in net.parameters())


class Scores(nn.Module):
    """A product of activations, which has no parameters."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ rows.transpose(1, 2) @ rows


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.scores = Scores()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.frozen(self.scores(self.first(images.flatten(1, 2)))).mean(1)


def test_what_owns_no_parameters_counts_for_the_nearest_around_it() -> None:
    """4 rows of 3: 2·4·3·4 for the layer; 2·4·4·4 twice for the scores; 2·4·4·4 for the frozen layer."""
    net = nn.Sequential(Attending(), nn.Linear(4, 2))
    work = work_of_parameters(net, (1, 4, 3))
    assert sum(work.values()) == pytest.approx(96 + 3 * 128 + 16)
    inner = 96 + 3 * 128
    assert work["0.first.weight"] == pytest.approx(inner * 12 / 16)
    assert work["1.weight"] == pytest.approx(16 * 8 / 10)


class Fussy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1)) * float(images.sum())


def test_a_network_that_needs_numbers_counts_nothing() -> None:
    assert work_of_parameters(Fussy(), (1, 1, 2)) == {"layer.weight": 0.0, "layer.bias": 0.0}
