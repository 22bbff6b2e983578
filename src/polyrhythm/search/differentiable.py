"""DARTS, first order: the edges of a cell chosen by gradients, in one training in which all kinds of edge are there.

H. Liu, K. Simonyan, Y. Yang, "DARTS: differentiable architecture search", ICLR 2019, arXiv 1806.09055, with the space
of `cell_network` (Dong and Yang, ICLR 2020, arXiv 2001.00326).

    edge_ij(x) = sum_k softmax(a_ij)_k kind_k(x)         a: one number a kind and edge, common to all cells
    a <- a - rate d/da L(half of the images; w, a)     w is not moved by it, and in between
    w <- w - rate d/dw L(other half; w, a)

In the end each edge is the kind with the largest number, `zero` only where it alone was allowed. Images are dealt out
into the two halves once, by the seed. Weights learn by SGD (0.025 down to 0.001 by a cosine, momentum 0.9, decay 3e-4,
gradients no longer than 5), numbers by Adam (betas 0.5 and 0.999, decay 1e-3), and batch norm scales nothing, as in the
paper. Departure: Adam's rate is 0.01, where the paper's 3e-4 is for tens of thousands of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.seeding import generator_for
from polyrhythm.errors import RequestError
from polyrhythm.models.architectures.cell_network import NODES, CellNetwork, Edge, edge_of
from polyrhythm.search.space import Space
from polyrhythm.specs import build, parse

ARCHITECTURES = "polyrhythm.models.architectures"
EDGES = tuple(f"e{first}{node}" for node in range(1, NODES) for first in range(node))
KINDS: tuple[Edge, ...] = get_args(Edge)
_RATE, _LEAST_RATE, _DECAY, _LONGEST = 0.025, 0.001, 3e-4, 5.0
_CHOICE_RATE, _CHOICE_DECAY, _CHOICE_BETAS = 0.01, 1e-3, (0.5, 0.999)


class MixedCell(nn.Module):
    """A cell with edges of all allowed kinds at once: maps (B, C, H, W) to the same shape.

    Args:
        allowed: kinds of each edge.
        numbers: a, of each edge as many; shared with other cells.
        width: C.
    """

    def __init__(self, allowed: Mapping[str, Sequence[Edge]], numbers: nn.ParameterDict, width: int) -> None:
        super().__init__()
        self._numbers = [numbers[name] for name in EDGES]  # no parameters of the cell's own
        self.edges = nn.ModuleList(
            nn.ModuleList(nn.Identity() if kind == "zero" else edge_of(kind, width) for kind in allowed[name])
            for name in EDGES
        )
        self._zero = [[kind == "zero" for kind in allowed[name]] for name in EDGES]

    def forward(self, images: Tensor) -> Tensor:
        """Return the last node."""
        nodes, place = [images], 0
        for node in range(1, NODES):
            total = torch.zeros_like(images)
            for first in range(node):
                shares = self._numbers[place].softmax(0)
                for share, kind, zero in zip(shares, self._kinds(place), self._zero[place], strict=True):
                    if not zero:
                        total = total + share * kind(nodes[first])
                place += 1
            nodes.append(total)
        return nodes[-1]

    def _kinds(self, place: int) -> nn.ModuleList:
        found = self.edges[place]
        assert isinstance(found, nn.ModuleList)
        return found


class Supernet(nn.Module):
    """A network of mixed cells.

    Args:
        allowed: kinds of each edge.
        network: configuration with the number of cells and channels.
        classes: number of classes.
        image_shape: (C, H, W) of an image.

    Attributes:
        numbers: a, of each edge by its name.
    """

    def __init__(
        self,
        allowed: Mapping[str, Sequence[Edge]],
        network: CellNetwork,
        classes: int,
        image_shape: tuple[int, int, int],
    ) -> None:
        super().__init__()
        self.allowed = allowed
        self.numbers = nn.ParameterDict(
            {name: nn.Parameter(1e-3 * torch.randn(len(allowed[name]))) for name in EDGES}
        )
        self.layers = network.of_cells(
            classes, image_shape, lambda width: MixedCell(allowed, self.numbers, width)
        )
        for module in self.layers.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_parameter("weight", None)
                module.register_parameter("bias", None)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (B, K), of images (B, C, H, W)."""
        found: Tensor = self.layers(images)
        return found

    def weights(self) -> list[nn.Parameter]:
        """Return all parameters but the numbers."""
        return list(self.layers.parameters())

    def chosen(self) -> dict[str, Edge]:
        """Return the kind of every edge that has the largest number."""
        found: dict[str, Edge] = {}
        for name in EDGES:
            order = self.numbers[name].detach().argsort(descending=True).tolist()
            kinds = [self.allowed[name][place] for place in order]
            found[name] = next((kind for kind in kinds if kind != "zero"), "zero")
        return found


@dataclass(frozen=True)
class Learned:
    """Result of a search by gradients.

    Attributes:
        edges: the kind of every edge.
        shares: shares of each kind that was allowed, by edge.
        losses: losses of each epoch, of the half that numbers learn from.
    """

    edges: dict[str, Edge]
    shares: dict[str, dict[str, float]]
    losses: list[float]


def searched(
    dataset: Dataset,
    allowed: Mapping[str, Sequence[Edge]],
    network: CellNetwork,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    notify: Callable[[str], None] = lambda text: None,
) -> Learned:
    """Choose the edges of a network.

    Args:
        dataset: dataset with the training images to learn from.
        allowed: kinds of each edge.
        network: configuration with the number of cells and channels; its edges are ignored.
        epochs: passes over half of the training images.
        batch_size: images of a step of each kind.
        seed: seed of everything that is random.
        notify: receiver of a line about every epoch.

    Raises:
        RequestError: there are too few images for two batches, or a loss is not finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Supernet(allowed, network, len(dataset.classes), dataset.image_shape).train()
    weights, numbers = model.weights(), list(model.numbers.parameters())
    by_weights = torch.optim.SGD(weights, lr=_RATE, momentum=0.9, weight_decay=_DECAY)
    by_numbers = torch.optim.Adam(numbers, lr=_CHOICE_RATE, betas=_CHOICE_BETAS, weight_decay=_CHOICE_DECAY)
    train = dataset.train
    dealt = torch.randperm(len(train), generator=generator_for("darts", seed))
    halves = dealt[: len(dealt) // 2], dealt[len(dealt) // 2 :]
    steps = len(halves[0]) // batch_size
    if steps < 1:
        raise RequestError(
            f"darts halves {len(train)} training images, and a batch has {batch_size}: lower --batch-size"
        )
    losses = []
    for epoch in range(epochs):
        orders = [
            half[torch.randperm(len(half), generator=generator_for("darts", seed, epoch, number))]
            for number, half in enumerate(halves)
        ]
        total = 0.0
        for step in range(steps):
            share = (epoch + step / steps) / epochs
            by_weights.param_groups[0]["lr"] = _LEAST_RATE + (_RATE - _LEAST_RATE) * (1 + cos(pi * share)) / 2
            for_weights, for_numbers = (
                order[step * batch_size : (step + 1) * batch_size] for order in orders
            )
            total += _learned(
                model, train.images(for_numbers), train.labels[for_numbers], numbers, by_numbers
            )
            loss = _loss(model, train.images(for_weights), train.labels[for_weights])
            for parameter, gradient in zip(weights, _slopes(loss, weights), strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(weights, _LONGEST)
            by_weights.step()
        losses.append(total / steps)
        if not torch.tensor(losses[-1]).isfinite():
            raise RequestError(f"darts: the loss is {losses[-1]} in epoch {epoch + 1}: lower --batch-size")
        notify(f"darts: epoch {epoch + 1} of {epochs}: loss {losses[-1]:.3f}")
    shares = {
        name: dict(zip(allowed[name], model.numbers[name].detach().softmax(0).tolist(), strict=True))
        for name in EDGES
    }
    return Learned(model.chosen(), shares, losses)


def _learned(
    model: Supernet, images: Tensor, labels: Tensor, numbers: list[nn.Parameter], optimizer: torch.optim.Adam
) -> float:
    """Let the numbers learn from a batch, and return its loss; weights stay."""
    loss = _loss(model, images, labels)
    for parameter, gradient in zip(numbers, _slopes(loss, numbers), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return float(loss.detach())


def _loss(model: Supernet, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def _slopes(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    # An edge that allows only zero has a number without effect.
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


@dataclass(frozen=True)
class Choice:
    """Open choices of a network.

    Attributes:
        allowed: kinds of each edge.
        network: configuration with all other settings.
    """

    allowed: dict[str, tuple[Edge, ...]]
    network: CellNetwork

    @classmethod
    def of(cls, space: Space) -> Choice:
        """Return the choices that a space leaves open.

        Raises:
            RequestError: something else than the edges of one `cell_network`.
        """
        how = 'write model: "cell_network(e01={e01}, …)" and a line e01: [skip, conv3, …] for each such edge'
        for name, domain in (*space.options.items(), *space.inner.items()):
            if len(domain.every() or ()) != 1 and name not in EDGES:
                raise RequestError(f"darts chooses edges of a cell_network, and {name} is none: {how}")
        kinds = {name: tuple(space.inner[name].every() or ()) for name in EDGES if name in space.inner}
        if not kinds or "model" not in space.options:
            raise RequestError(f"darts chooses edges of a cell_network, and the space has none: {how}")
        for name, values in kinds.items():
            if strange := [value for value in values if value not in KINDS]:
                raise RequestError(f"{name} cannot be {strange[0]!r}: edges are {', '.join(KINDS)}")
        tried = {name: values[-1] for name, values in kinds.items()}
        spec = str(space.run_options(tried)["model"])
        network = build("model", spec, ARCHITECTURES) if parse(spec).name == CellNetwork.name else None
        if not isinstance(network, CellNetwork) or any(
            getattr(network, name) != tried[name] for name in kinds
        ):
            raise RequestError(f"darts chooses edges of a cell_network, and the model is {spec}: {how}")
        return cls({name: kinds.get(name, (getattr(network, name),)) for name in EDGES}, network)

    def parameters(self, space: Space, edges: Mapping[str, Edge]) -> dict[str, Any]:
        """Return the parameters of a trial with these edges."""
        return space.draw(
            lambda name, domain: edges[name] if name in edges else (domain.every() or [None])[0]
        )
