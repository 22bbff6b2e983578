"""Batches of one picture, normalized by what is known where one number has no variance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.jobs import blobs, make_job, simulated, uneven
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.forward_pass import by_running_statistics, check_learns_alone


def narrow() -> nn.Module:
    """A network that normalizes one number a channel and picture."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def wide() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def test_one_number_a_channel_is_normalized_by_running_statistics() -> None:
    layer, values = nn.BatchNorm1d(3), torch.tensor([[1.0, 5.0, -2.0]])
    layer.running_mean, layer.running_var = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([4.0, 4.0, 1.0])
    with by_running_statistics(layer):
        found = layer(values)
    assert torch.allclose(found, torch.tensor([[0.0, 2.0, -2.0]]), atol=1e-4)
    assert layer.running_mean.tolist() == [1.0, 1.0, 0.0]
    assert layer.training
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(values)


def test_where_there_are_more_numbers_nothing_changes() -> None:
    one, other = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    image = torch.arange(8.0).view(1, 2, 2, 2)
    with by_running_statistics(one):
        found = one(image)
    assert torch.equal(found, other(image))
    assert torch.equal(one.running_mean, other.running_mean)


def test_frozen_layers_stay_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2))
    with by_running_statistics(model):
        model(torch.ones(1, 2))
    assert [layer.training for layer in model] == [False, True]


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server", "local_sgd(steps=2)"])
def test_a_ragged_batch_of_one_picture_is_learned_from(spec: str) -> None:
    """17 pictures are 2 steps of two workers with four each, and one picture is left for worker 0."""
    job = make_job(spec, 2, model=narrow, dataset=blobs(17))
    found = simulated(job, ConstantCluster(step_s=uneven)).result
    assert (found["images_not_seen"], found["steps"]) == (0, 6)
    assert math.isfinite(found["train_loss"])


def _assembled(model: Callable[[], nn.Module], **options: Any) -> None:
    data = tuple((torch.randn(count, 1, 4, 4), torch.arange(count) % 3) for count in (18, 3))
    assemble(
        configure({"data": data, "model": model(), "cache": "none", "device": "cpu", **options}),
        CheckpointConfig(),
    )


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"workers": 18, "batch_size": 4}])
def test_where_all_batches_are_of_one_picture_the_run_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(
        RequestError, match=r"single image.* ask for a larger batch_size, or for fewer workers"
    ):
        _assembled(narrow, **options)
    _assembled(wide, **options)


def test_a_network_that_fails_with_any_batch_shows_its_own_error() -> None:
    class Broken(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        check_learns_alone(Broken, (1, 4, 4))
