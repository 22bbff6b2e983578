"""Why free-running workers fail at rates that others bear: the rate that a delay allows, and a network's sharpness.

    python benchmarks/asynchrony/stability.py

On a quadratic of curvature L, SGD with momentum m whose gradients are `delay` updates old,

    w(t+1) = w(t) + m (w(t) - w(t-1)) - lr L w(t - delay),

is stable while all roots of its characteristic polynomial are inside the unit circle. Printed is the largest stable
lr L / (1 - m), the *effective* rate times the curvature, by bisection; then the sharpness of `lenet5` (the largest
eigenvalue of its Hessian on 512 pictures of Fashion-MNIST, by 12 power iterations) as plain SGD trains it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from polyrhythm.data.open import open_data
from polyrhythm.models.create import create_model

MOMENTA, DELAYS = (0.0, 0.5, 0.9), (0, 1, 2, 3, 7, 15)
RATE, MOMENTUM, BATCH, STEPS = 0.0125, 0.9, 32, (0, 20, 60, 120)
"""The default rate of four asynchronous workers, and after which of their updates the sharpness is measured."""


def largest_rate(momentum: float, delay: int) -> float:
    """Return the largest stable lr L."""
    low, high = 0.0, 5.0
    for _ in range(40):
        rate = (low + high) / 2
        polynomial = np.zeros(max(delay, 1) + 2)
        polynomial[0], polynomial[1], polynomial[2] = 1, -(1 + momentum), momentum
        polynomial[delay + 1] += rate
        stable = max(abs(np.roots(polynomial))) <= 1 + 1e-9
        low, high = (rate, high) if stable else (low, rate)
    return low


def sharpness(network: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the largest eigenvalue of the Hessian of the loss."""
    parameters = list(network.parameters())
    vector, found = [torch.randn_like(each) for each in parameters], 0.0
    for _ in range(12):
        norm = torch.stack([each.square().sum() for each in vector]).sum().sqrt()
        vector = [each / norm for each in vector]
        loss = nn.functional.cross_entropy(network(pictures), labels)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        product = torch.stack([(a * b).sum() for a, b in zip(slopes, vector, strict=True)]).sum()
        image = torch.autograd.grad(product, parameters)
        found = float(torch.stack([(a * b).sum() for a, b in zip(image, vector, strict=True)]).sum())
        vector = list(image)
    return found


def trained(seed: int) -> list[float]:
    """Return the sharpness after some updates."""
    data = open_data("fashion-mnist")
    places = torch.arange(10_000)
    pictures, labels = data.train.images(places), data.train.labels[places]
    torch.manual_seed(seed)
    network = create_model("lenet5", classes=10, image_shape=(1, 28, 28))
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM)
    found = []
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            found.append(sharpness(network, pictures[:512], labels[:512]))
        batch = torch.randint(len(pictures), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(pictures[batch]), labels[batch]).backward()
        optimizer.step()
    return found


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    print("| delay | " + " | ".join(f"m = {momentum}" for momentum in MOMENTA) + " |")
    print("|---" * (1 + len(MOMENTA)) + "|")
    for delay in DELAYS:
        cells = (f"{largest_rate(momentum, delay) / (1 - momentum):.2f}" for momentum in MOMENTA)
        print(f"| {delay} | {' | '.join(cells)} |")
    print(f"\n| seed | {' | '.join(f'after {step}' for step in STEPS)} |\n" + "|---" * (1 + len(STEPS)) + "|")
    for seed in (0, 2):
        print(f"| {seed} | {' | '.join(f'{each:.0f}' for each in trained(seed))} |", flush=True)


if __name__ == "__main__":
    main()
