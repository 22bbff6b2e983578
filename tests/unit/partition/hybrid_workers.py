"""Hybrid passes of several workers over simulated links, and the plain network that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.partition.cut import cut
from polyrhythm.partition.hybrid_pass import HybridPass, Scheme

CLASSES = 5
IMAGE = (2, 6, 6)


def network(dropout: float = 0.0) -> nn.Module:
    """Makes a network with one convolution and three fully connected layers, in float64, from one seed."""
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(48, 11),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(11, 7),
        nn.ReLU(inplace=True),
        nn.Linear(7, CLASSES),
    ).double()


def batch(worker: int, size: int) -> tuple[Tensor, Tensor]:
    """Makes a worker's pictures and labels."""
    generator = torch.Generator().manual_seed(100 + worker)
    images = torch.randn(size, *IMAGE, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (size,), generator=generator)


@dataclass
class Passed:
    """What a worker's pass left: its network with gradients, its loss, and what it received."""

    model: nn.Module
    loss: float
    received_bytes: int
    places: list[slice]


def passes(
    scheme: Scheme,
    sizes: Sequence[int],
    *,
    make: Callable[[], nn.Module] = network,
    latency_s: float = 1e-3,
    lag_s: float = 0.0,
) -> list[Passed]:
    """Runs one pass of every worker, whose weight is its share of the largest batch.

    Args:
        scheme: of the rounds.
        sizes: of the workers' batches.
        make: makes a worker's network.
        latency_s: of a link.
        lag_s: of each worker behind the one before it.
    """
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, latency_s, 1e6), len(sizes))
    found: dict[int, Passed] = {}

    def play(rank: int) -> None:
        model = make()
        images, labels = batch(rank, sizes[rank])
        hybrid = HybridPass(cut(model, images.new_zeros(1, *IMAGE)), cluster.communicator(rank), scheme)
        time.sleep(lag_s * rank)
        torch.manual_seed(rank)

        def loss(logits: Tensor, place: slice) -> Tensor:
            return functional.cross_entropy(logits, labels[place])

        value = hybrid.run(images, loss, sizes[rank] / max(sizes))
        found[rank] = Passed(model, value, hybrid.received_bytes, hybrid.places)

    for rank in range(len(sizes)):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    return [found[rank] for rank in range(len(sizes))]


def serial(sizes: Sequence[int]) -> tuple[nn.Module, list[float]]:
    """Gives the plain network with the gradients of one batch of all workers' pictures, and each worker's loss."""
    model = network()
    batches = [batch(worker, size) for worker, size in enumerate(sizes)]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    losses = functional.cross_entropy(model(images), labels, reduction="none")
    losses.mean().backward()
    return model, [float(part.mean()) if len(part) else 0.0 for part in losses.detach().split(list(sizes))]


def gradients(passed: Sequence[Passed], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Puts the workers' gradients together: trunks are added up, of the head every worker has its rows."""
    whole = sum(sizes) / max(sizes)
    together: dict[str, Tensor] = {}
    layers = ("4", "7", "9")
    for worker in passed:
        for name, parameter in worker.model.named_parameters():
            if parameter.grad is not None:
                together[name] = together.get(name, torch.zeros_like(parameter)) + parameter.grad / whole
        for layer, place in zip(layers, worker.places, strict=True):
            for kind in ("weight", "bias"):
                outside = worker.model.get_parameter(f"{layer}.{kind}").grad
                assert outside is not None
                outside = outside.clone()
                outside[place] = 0
                assert not outside.any(), "a worker has no gradients but of its own neurons"
    return together
