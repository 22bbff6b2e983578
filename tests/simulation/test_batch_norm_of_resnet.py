"""What does not travel with gradients: ResNet-18's batch-norm statistics, at asynchronous servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from conformance.jobs import make_job, simulated, uneven
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.models.create import create_model
from polyrhythm.simulation.run import ConstantCluster

WORKERS = 2


def pictures() -> Dataset:
    """Makes 16 tiny pictures of two classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(16) % 2
    images = torch.randn(16, 3, 32, 32, generator=generator) + labels.view(-1, 1, 1, 1)
    split = TensorSplit(images, labels)
    return Dataset("pictures", split, split, ("a", "b"), (3, 32, 32), default_epochs=1)


def test_the_saved_model_has_the_mean_of_the_workers_statistics(tmp_path: Path) -> None:
    job = make_job(
        "parameter_server(servers=2)",
        WORKERS,
        model=lambda: create_model("resnet18", classes=2, image_shape=(3, 32, 32)),
        dataset=pictures(),
        folder=tmp_path,
        checkpoints=0,
        epochs=1,
        batch_size=4,
    )
    trained = simulated(job, ConstantCluster(step_s=uneven))
    saved = load_file(tmp_path / "model.safetensors")
    own = [dict(model.named_buffers()) for model in trained.models]
    means = [name for name in own[0] if name.endswith(("running_mean", "running_var"))]
    assert len(means) == 40  # twenty layers
    for name in means:
        assert not torch.equal(own[0][name], own[1][name])
        expected = (own[0][name].double() + own[1][name].double()) / 2
        torch.testing.assert_close(saved[name].double(), expected, rtol=1e-6, atol=1e-7)
    model = job.make_model()
    model.load_state_dict(saved)
    model.eval()
    test = job.dataset.test
    with torch.no_grad():
        loss = functional.cross_entropy(model(test.images(torch.arange(16))), test.labels)
    assert trained.result["test_loss"] == pytest.approx(loss.item(), rel=1e-4)
