"""AdaScale's gain against its closed form, and its runs against SGD with a rate that is multiplied by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import batch, cosine, make_job, simulated, uneven, vector_of
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.joint_optimizers.adascale import AdaScale, AdaScaleOptimizer

UNEVEN = ConstantCluster(step_s=uneven, latency_s=1e-3)


class Drawn:
    """Other workers, whose gradients are drawn: all have the same images."""

    rank = 0

    def __init__(self, gradients: list[Tensor]) -> None:
        self.gradients, self.size = gradients, len(gradients)

    def all_reduce(self, told: Tensor) -> None:
        images = float(told[1])
        squares = images * sum(float(gradient.square().sum()) for gradient in self.gradients)
        told.copy_(torch.tensor([squares, images * self.size, self.size, float(told[3])]))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        pass


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0])
def test_the_gain_is_that_of_a_known_covariance(workers: int, noise: float) -> None:
    """r = (s2 + m2) / (s2 / S + m2) with s2 = n noise^2 and m2 = |G|^2."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(100, 1, bias=False).double()
    optimizer = AdaScale(momentum=0).create(model.parameters())
    assert isinstance(optimizer, AdaScaleOptimizer)
    flat = FlatParameters(model)
    optimizer.tie(model)
    true = torch.full((100,), 0.1, dtype=torch.float64)
    for number in range(400):
        drawn = [
            true + noise * torch.randn(100, generator=generator, dtype=torch.float64) for _ in range(workers)
        ]
        optimizer.workers = Drawn(drawn)
        optimizer.begin(number, 0)
        optimizer.note_own(drawn[0], 16)
        flat.gradients.copy_(sum(drawn) / workers)
        optimizer.update(flat, 1e-9)
    noise_square, signal = 100 * noise**2, 1.0
    expected = (noise_square + signal) / (noise_square / workers + signal)
    assert optimizer.gain == pytest.approx(expected, rel=0.03)


def by_hand(job, workers: int) -> Tensor:  # type: ignore[no-untyped-def]
    torch.manual_seed(job.learning.seed)
    model = job.make_model()
    total = job.steps_per_epoch * job.learning.epochs
    noise_mean = signal_mean = 0.0
    buffer = torch.zeros_like(vector_of(model))
    for step in range(total):
        gradients, counts = [], []
        for worker in range(workers):
            images, labels = batch(job, *divmod(step, job.steps_per_epoch), worker, workers)
            loss = functional.cross_entropy(model(images.double()), labels)
            found = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(torch.cat([each.reshape(-1) for each in found]))
            counts.append(len(labels))
        weights = torch.tensor(counts).double() / sum(counts)
        mean = sum(weight * gradient for weight, gradient in zip(weights, gradients, strict=True))
        squares = sum(float(w * g.square().sum()) for w, g in zip(weights, gradients, strict=True))
        noise = workers / (workers - 1) * (squares - float(mean.square().sum()))
        signal = float(mean.square().sum()) - noise / workers
        kept = min(1 - workers / 1000, 1 - 1 / (step + 1))
        noise_mean = kept * noise_mean + (1 - kept) * noise
        signal_mean = kept * signal_mean + (1 - kept) * signal
        above, below = max(noise_mean, 1e-6), max(signal_mean, 0)
        gain = (above + below) / (above / workers + below)
        buffer = 0.9 * buffer + mean
        moved = vector_of(model) - cosine(job, step, total) * gain * buffer
        torch.nn.utils.vector_to_parameters(moved, model.parameters())
    return vector_of(model)


def test_a_run_is_that_of_a_plain_loop() -> None:
    job = make_job("synchronous", 3, optimizer="adascale(lr=0.05)", dtype=torch.float64)
    expected = by_hand(job, 3)
    for model in simulated(job, UNEVEN).models:
        torch.testing.assert_close(vector_of(model), expected, rtol=1e-8, atol=1e-10)


def test_alone_it_is_sgd() -> None:
    """One worker has nobody to differ from."""
    found = simulated(make_job("synchronous", 1, optimizer="adascale(lr=0.05)"), UNEVEN)
    expected = simulated(make_job("synchronous", 1, optimizer="sgd(lr=0.05)"), UNEVEN)
    assert torch.equal(vector_of(found.models[0]), vector_of(expected.models[0]))
