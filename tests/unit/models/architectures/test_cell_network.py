"""Networks of cells, against the sum over all ways through a cell's graph."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.models.architectures.cell_network import Cell, CellNetwork, Edge
from polyrhythm.specs import build

NAMES = [f"e{first}{second}" for second in range(1, 4) for first in range(second)]
LINEAR = ["zero", "skip", "pool"]


def plain_edge(kind: str, images: Tensor, layers: nn.Module | None) -> Tensor:
    if kind == "zero":
        return images * 0
    if kind == "skip":
        return images
    if kind == "pool":
        ones = functional.avg_pool2d(functional.pad(torch.ones_like(images), (1, 1, 1, 1)), 3, stride=1)
        return functional.avg_pool2d(functional.pad(images, (1, 1, 1, 1)), 3, stride=1) / ones
    assert isinstance(layers, nn.Sequential)
    weight = layers[1].weight
    made = functional.conv2d(images.relu(), weight, padding=weight.shape[-1] // 2)
    mean, variance = made.mean((0, 2, 3), keepdim=True), made.var((0, 2, 3), keepdim=True, unbiased=False)
    return (made - mean) / (variance + 1e-5).sqrt()


@pytest.mark.parametrize("seed", range(12))
def test_a_node_is_the_sum_of_what_its_edges_bring(seed: int) -> None:
    random = Random(seed)
    edges = {name: random.choice(get_args(Edge)) for name in NAMES}
    torch.manual_seed(seed)
    cell, images = Cell(CellNetwork(**edges), 3).double(), torch.randn(4, 3, 5, 6, dtype=torch.float64)
    nodes = [images]
    for second in range(1, 4):
        brought = []
        for first in range(second):
            name = f"e{first}{second}"
            layers = cell.edges[name] if edges[name] in ("conv1", "conv3") else None
            brought.append(plain_edge(edges[name], nodes[first], layers))
        nodes.append(torch.stack(brought).sum(0))
    torch.testing.assert_close(cell(images), nodes[3], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_of_linear_edges_a_cell_is_the_sum_of_all_ways_through_it(seed: int) -> None:
    random = Random(seed)
    edges = {name: random.choice(LINEAR) for name in NAMES}
    images = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    total = torch.zeros_like(images)
    for many in range(3):
        for between in combinations((1, 2), many):
            value, way = images, (0, *between, 3)
            for first, second in pairwise(way):
                value = plain_edge(edges[f"e{first}{second}"], value, None)
            total += value
    torch.testing.assert_close(Cell(CellNetwork(**edges), 1)(images), total)


def test_stages_halve_the_picture_and_double_the_channels() -> None:
    model = CellNetwork(channels=4, cells=2).create(10, (1, 8, 8))
    shapes = []
    images = torch.zeros(2, 1, 8, 8)
    for layer in model:
        images = layer(images)
        if isinstance(layer, Cell):
            shapes.append(tuple(images.shape[1:]))
    assert shapes == [(4, 8, 8)] * 2 + [(8, 4, 4)] * 2 + [(16, 2, 2)] * 2
    assert images.shape == (2, 10)


def test_its_text_is_its_description() -> None:
    text = "cell_network(e01=pool, e02=zero, e12=conv1, e03=zero, e13=skip, e23=conv3, channels=4)"
    made = build("model", text, "polyrhythm.models.architectures")
    assert build("model", str(made), "polyrhythm.models.architectures") == made
    assert [made.edge(first, second) for first, second in ((0, 1), (1, 2), (1, 3))] == [
        "pool",
        "conv1",
        "skip",
    ]


@pytest.mark.parametrize(
    "zeros", [("e03", "e13", "e23"), ("e01", "e02", "e03"), ("e03", "e13", "e02", "e12")]
)
def test_a_cell_that_nothing_gets_through_is_refused(zeros: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="no way leads through its cells"):
        CellNetwork(**dict.fromkeys(zeros, "zero")).create(10, (1, 8, 8))


def test_what_it_cannot_take_is_refused() -> None:
    with pytest.raises(RequestError, match="does not support images of 3x9"):
        CellNetwork().create(10, (1, 3, 9))
    with pytest.raises(RequestError, match="e01"):
        build("model", "cell_network(e01=conv5)", "polyrhythm.models.architectures")
