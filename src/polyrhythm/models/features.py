"""The features of a network: what its last layer reads, where that is linear; they stay as long as the body does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.models.fine_tuning import head_of

if TYPE_CHECKING:
    from collections.abc import Callable


def head_layer(model: nn.Module) -> nn.Linear:
    """Return the fully connected layer that computes the class scores.

    Raises:
        RequestError: it is not fully connected.
    """
    name = head_of(model)
    layer = model.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise RequestError(f"the head {name} is a {type(layer).__name__}, not a fully connected layer")
    return layer


def feature_function(model: nn.Module, image_shape: tuple[int, int, int]) -> Callable[[Tensor], Tensor]:
    """Return the function from images (B, C, H, W) to the features (B, D) that the head reads.

    Args:
        model: model in evaluation mode.
        image_shape: (C, H, W), for a check that the network's output is the head's.

    Raises:
        RequestError: something follows the head, or it reads other than one vector an image.
    """
    layer = head_layer(model)
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        seen.clear()
        model(images)
        return seen.pop()

    weight = layer.weight
    probe = torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        expected = model(probe)
        found = seen.pop() if len(seen) == 1 else None
        seen.clear()
        if found is None or found.ndim != 2 or not torch.allclose(layer(found), expected, atol=1e-4):
            raise RequestError("the network's output is not that of its last layer, read once")
    return features


def set_head(model: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Copy weight (classes, D) and bias (classes,) into the head, in place."""
    layer = head_layer(model)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)


def lower_part(model: nn.Module, share: float) -> str:
    """Return the names, separated by commas, of the first children that hold at most a share of the parameters.

    Members of a child that is a sequence count as children, as in `models.fine_tuning.stages`.
    """
    children: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        inside = [
            (f"{name}.{key}", part)
            for key, part in child.named_children()
            if any(True for _ in part.parameters())
        ]
        nested = isinstance(child, nn.Sequential | nn.ModuleList) and len(inside) > 1
        children += inside if nested else [(name, child)]
    total = sum(parameter.numel() for parameter in model.parameters())
    taken, names = 0, []
    for name, child in children:
        taken += sum(parameter.numel() for parameter in child.parameters())
        if taken > share * total:
            break
        if any(True for _ in child.parameters()):
            names.append(name)
    return ",".join(names)
