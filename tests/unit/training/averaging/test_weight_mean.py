"""Means of networks, and batch norms made to fit them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.training.weight_averaging import mean_weights, recompute_batch_norms


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(50, generator=generator), "count": torch.tensor(seed)}


def test_the_mean_is_that_of_the_numbers() -> None:
    states = [_state(seed) for seed in range(5)]
    found = mean_weights(states)
    expected = torch.stack([state["weight"].double() for state in states]).mean(0).float()
    torch.testing.assert_close(found["weight"], expected)
    assert found["weight"].dtype == torch.float32
    assert found["count"] == 0


def test_constant_weights_stay_bit_for_bit() -> None:
    assert torch.equal(mean_weights(iter([_state(1)] * 7))["weight"], _state(1)["weight"])


def test_the_given_weights_are_not_changed() -> None:
    first = {"weight": torch.zeros(2, dtype=torch.float64)}
    mean_weights([first, {"weight": torch.ones(2, dtype=torch.float64)}])
    assert first["weight"].tolist() == [0, 0]


def test_statistics_are_the_means_over_the_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.9), nn.Flatten(), nn.Linear(8, 2)
    )
    model[1].running_mean.fill_(99)
    batches = [torch.randn(4, 1, 2, 2) + shift for shift in (0, 1, 5)]
    with torch.no_grad():
        made = [model[0](batch) for batch in batches]
    recompute_batch_norms(model, batches)
    mean = torch.stack([each.mean((0, 2, 3)) for each in made]).mean(0)
    variance = torch.stack([each.var((0, 2, 3)) for each in made]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, variance)
    assert model[1].momentum == 0.1
    assert all(module.training for module in model.modules())


def test_a_network_without_norms_looks_at_nothing() -> None:
    batches = iter([torch.zeros(1, 2)])
    recompute_batch_norms(nn.Linear(2, 2), batches)
    assert len(list(batches)) == 1


def test_different_networks_are_refused() -> None:
    with pytest.raises(RequestError, match="of different networks"):
        mean_weights([_state(0), {"weight": torch.zeros(3), "count": torch.tensor(0)}])
    with pytest.raises(RequestError, match="no weights to average"):
        mean_weights([])
