"""A small task for loops that run alone, distributed or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def points(count: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Gives `(count, 6)` inputs and labels of 3 classes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    labels = (inputs @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
    return TensorDataset(inputs.to(dtype), labels)


def network(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    own = torch.Generator().manual_seed(
        2
    )  # workers that are threads share torch's, and draw between each other's
    with torch.no_grad():
        for layer in (model[0], model[3]):
            for parameter in (layer.weight, layer.bias):
                parameter.uniform_(-(layer.in_features**-0.5), layer.in_features**-0.5, generator=own)
    return model.to(dtype)


def shuffled(
    count: int, batch_size: int, dtype: torch.dtype = torch.float64
) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(points(count, dtype), batch_size=batch_size, shuffle=True)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
