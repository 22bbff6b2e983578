"""A network of equal cells, each a small graph with edges that may be chosen: the space of a search for networks.

X. Dong, Y. Yang, "NAS-Bench-201: extending the scope of reproducible neural architecture search", ICLR 2020, arXiv
2001.00326, section 2.

    images ─ stem ─ cells at C ─ halve ─ cells at 2C ─ halve ─ cells at 4C ─ mean over pixels ─ logits

    cell     node_j = sum over i < j of edge_ij(node_i),  j = 1, 2, 3;    node_0 is the input, node_3 the output
    edge     zero: 0    skip: x    pool: 3x3 mean    conv1, conv3: BN(conv(relu(x)))
    stem     BN(conv3(x))
    halve    BN(conv3, stride 2 (relu(x)))

C is `channels`, and each stage has `cells` cells. Five kinds of edge in six places are 15,625 cells. Departures: the
paper halves by a residual block of two convolutions, and has 16 channels and 5 cells a stage, for images of 32 pixels
a side.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

Edge = Literal["zero", "skip", "pool", "conv1", "conv3"]
"""Operation on an edge between two nodes."""

NODES = 4
_SHORTEST_SIDE = 4


class CellNetwork(Config):
    """A network of equal cells.

    Attributes:
        e01: the edge from node 0 to node 1, and so on.
        e02: the edge from node 0 to node 2.
        e12: the edge from node 1 to node 2.
        e03: the edge from node 0 to node 3.
        e13: the edge from node 1 to node 3.
        e23: the edge from node 2 to node 3.
        channels: channels of the first stage; the next has twice as many, the last four times.
        cells: cells of a stage.
    """

    stages: ClassVar[int] = 3

    e01: Edge = "conv3"
    e02: Edge = "conv3"
    e12: Edge = "conv3"
    e03: Edge = "skip"
    e13: Edge = "conv1"
    e23: Edge = "conv3"
    channels: PositiveInt = 8
    cells: PositiveInt = 1

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network.

        Raises:
            RequestError: no way leads through its cells, or a side of the images is shorter than 4 pixels.
        """
        if not self.leads_through():
            raise RequestError(
                f"{self}: no way leads through its cells, so all images would look alike: give one of the edges on a "
                "way from 0 to 3 another kind than zero"
            )
        return self.of_cells(classes, image_shape, lambda width: Cell(self, width))

    def of_cells(
        self, classes: int, image_shape: tuple[int, int, int], cell: Callable[[int], nn.Module]
    ) -> nn.Module:
        """Return a network with other cells.

        Args:
            classes: number of classes.
            image_shape: (C, H, W) of an image.
            cell: function that returns a cell with the given number of channels.

        Raises:
            RequestError: a side of the images is shorter than 4 pixels.
        """
        inputs, height, width = image_shape
        if min(height, width) < _SHORTEST_SIDE:
            raise RequestError(
                f"model cell_network does not support images of {height}x{width}: both sides need "
                f"{_SHORTEST_SIDE} pixels "
                "or more, give --image-size"
            )
        widths = [self.channels * 2**stage for stage in range(self.stages)]
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            *(cell(widths[0]) for _ in range(self.cells)),
        ]
        for before, after in pairwise(widths):
            layers += [_convolution(before, after, 3, stride=2), *(cell(after) for _ in range(self.cells))]
        layers += [nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], classes))

    def edge(self, first: int, second: int) -> Edge:
        """Return the edge between two nodes of a cell."""
        found: Edge = getattr(self, f"e{first}{second}")
        return found

    def leads_through(self) -> bool:
        """Return whether a way leads from node 0 to node 3."""
        reached = {0}
        for node in range(1, NODES):
            if any(first in reached and self.edge(first, node) != "zero" for first in range(node)):
                reached.add(node)
        return NODES - 1 in reached


class Cell(nn.Module):
    """A cell: maps (B, C, H, W) to the same shape.

    Args:
        network: configuration with its edges.
        width: C.
    """

    def __init__(self, network: CellNetwork, width: int) -> None:
        super().__init__()
        self.edges = nn.ModuleDict()
        self._into: list[list[str]] = []
        for node in range(1, NODES):
            names = {first: f"e{first}{node}" for first in range(node) if network.edge(first, node) != "zero"}
            for first, name in names.items():
                self.edges[name] = edge_of(network.edge(first, node), width)
            self._into.append(list(names.values()))

    def forward(self, images: Tensor) -> Tensor:
        """Return the last node."""
        nodes = [images]
        for names in self._into:
            parts = [self.edges[name](nodes[int(name[1])]) for name in names]
            nodes.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(images))
        return nodes[-1]


def edge_of(kind: Edge, width: int) -> nn.Module:
    """Return the module of an edge between two nodes, (B, C, H, W); any kind but zero."""
    if kind == "skip":
        return nn.Identity()
    if kind == "pool":
        return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return _convolution(width, width, 1 if kind == "conv1" else 3)


def _convolution(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )
