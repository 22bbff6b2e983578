"""The gradient noise scale, against covariances that are known, and against every image's own gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from conformance.jobs import blobs, make_job, perceptron, simulated, uneven
from polyrhythm.events import NoiseMeasured
from polyrhythm.reporting.figures import RunFigures, noise_scale
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.noise_scale import GradientNoise, NoiseMeter, compared

UNEVEN = ConstantCluster(step_s=uneven)


@pytest.mark.parametrize(("own", "images"), [(1, 2), (16, 64), (100, 101)])
def test_of_expected_squares_the_estimates_are_exact(own: int, images: int) -> None:
    signal, noise = 3.0, 700.0
    found = compared(signal + noise / own, own, signal + noise / images, images)
    assert (found.signal, found.noise) == (pytest.approx(signal, rel=1e-9), pytest.approx(noise, rel=1e-9))
    assert found.scale == pytest.approx(noise / signal)


def test_of_a_known_covariance_the_mean_of_many_estimates_is_its_trace() -> None:
    """Gradients of an image are drawn from N(G, C): |G|^2 = 12, trace C = 55; 4,000 steps of four workers."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64)
    factor = torch.tensor([[3.0, 0, 0], [1, 6, 0], [0, 0, 3]], dtype=torch.float64)
    assert (factor @ factor.T).trace() == 55
    steps, workers, batch = 4_000, 4, 8
    drawn = torch.randn(steps, workers, batch, 3, dtype=torch.float64, generator=generator) @ factor.T + mean
    own, together = drawn[:, 0].mean(1), drawn.mean((1, 2))
    found = GradientNoise()
    for one, other in zip(own, together, strict=True):
        found = found.plus(compared(float(one @ one), batch, float(other @ other), workers * batch))
    assert found.noise / steps == pytest.approx(55, rel=0.03)
    assert found.signal / steps == pytest.approx(12, rel=0.03)
    assert found.scale == pytest.approx(55 / 12, rel=0.05)


def test_a_step_is_compared_only_where_a_workers_batch_is_not_all_there_is() -> None:
    meter = NoiseMeter()
    meter.note_mean(torch.ones(2), 8)
    assert meter.taken() is None
    meter.note_own(torch.ones(2), 8)
    meter.note_mean(torch.ones(2), 8)
    assert meter.taken() is None
    meter.note_own(torch.tensor([3.0, 4.0]), 4)
    meter.note_mean(torch.tensor([0.0, 1.0]), 8)
    assert meter.taken() == compared(25.0, 4, 1.0, 8)
    assert meter.taken() is None


def gradients_of_all(job) -> Tensor:  # type: ignore[no-untyped-def]
    """Gives the gradient of every training image, (n, numbers), in plain torch."""
    torch.manual_seed(job.learning.seed)
    model, train = job.make_model(), job.dataset.train
    found = []
    for index in range(len(train)):
        model.zero_grad()
        image = train.images(torch.tensor([index])).to(torch.float64)
        functional.cross_entropy(model(image), train.labels[index : index + 1]).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return torch.stack(found)


def test_a_run_measures_what_all_images_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters stay where they are: 50 epochs of 6 steps, every one of which is compared."""
    monkeypatch.setattr(NoiseMeter, "every", 1)
    monkeypatch.setattr(NoiseMeter, "first", 0)
    job = make_job(
        "synchronous(bucket_bytes=64)",
        4,
        model=perceptron,
        dataset=blobs(train=96),
        dtype=torch.float64,
        epochs=50,
        batch_size=4,
        schedule="constant",
        optimizer="sgd(lr=1e-12, momentum=0)",
    )
    events = simulated(job, UNEVEN).events
    measured = [event for event in events if isinstance(event, NoiseMeasured)]
    all_of_them = gradients_of_all(job)
    mean = all_of_them.mean(0)
    covariance = (all_of_them - mean).square().sum() / (len(all_of_them) - 1)
    # Batches are drawn without putting back, which takes a little off the square of the mean.
    signal = mean @ mean - covariance / len(all_of_them)
    count = sum(event.measured for event in measured)
    assert count == 300
    assert sum(event.noise for event in measured) / count == pytest.approx(float(covariance), rel=0.1)
    assert sum(event.signal for event in measured) / count == pytest.approx(float(signal), rel=0.1)
    told = noise_scale(RunFigures.of(events).noise)
    assert told is not None
    assert told["batch"] == 16
    assert told["images"] == pytest.approx(float(covariance / signal), rel=0.2)


@pytest.mark.parametrize("workers", [1, 2])
def test_measuring_changes_no_bit(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("synchronous(bucket_bytes=64)", workers, epochs=6)
    measured = simulated(job, UNEVEN)
    assert any(isinstance(event, NoiseMeasured) for event in measured.events) == (workers > 1)
    monkeypatch.setattr(NoiseMeter, "first", -1)
    assert simulated(job, UNEVEN).sha256 == measured.sha256


def test_of_a_long_run_a_bounded_number_of_sums_is_kept() -> None:
    figures = RunFigures()
    for step in range(5000):
        figures.add(NoiseMeasured(time_s=1.0, step=step, measured=1, noise=2.0, signal=0.5, images=64))
    assert len(figures.noise) <= 512
    assert sum(event.measured for event in figures.noise) == 5000
    told = noise_scale(figures.noise)
    assert told is not None
    assert told["images"] == pytest.approx(4.0)


def test_of_too_little_or_of_noise_alone_nothing_is_told() -> None:
    def event(measured: int, noise: float, signal: float) -> NoiseMeasured:
        return NoiseMeasured(time_s=1.0, step=100, measured=measured, noise=noise, signal=signal, images=64)

    assert noise_scale([]) is None
    assert noise_scale([event(9, 900.0, 1.0)]) is None
    assert noise_scale([event(20, 900.0, -1.0)]) is None
    told = noise_scale([event(20, 38_000.0, 20.0)])
    assert told is not None
    assert told["text"].startswith("larger batches stop paying at about 1,900 images")
