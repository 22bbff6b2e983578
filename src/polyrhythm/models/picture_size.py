"""Finds out at once, not in the first training step, whether a network can take pictures of a size."""

from __future__ import annotations

import re
from itertools import chain

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError

_SIDES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512)
_BATCH = 2


def check_picture_size(model: nn.Module, name: str, classes: int, image_shape: tuple[int, int, int]) -> None:
    """Checks that a network on the CPU maps pictures (B, C, H, W) to logits (B, classes).

    The forward pass is done on shapes alone, which costs no arithmetic and draws no random numbers. Some
    networks cannot be run so; a failure counts only if an ordinary forward pass fails too.

    Args:
        model: the network; left as it was.
        name: what to call it in the error.
        classes: the width that its output must have.
        image_shape: (C, H, W) of a picture.

    Raises:
        RequestError: it cannot take such pictures, or gives something else than logits.
    """
    training = model.training
    model.eval()
    try:
        try:
            output = _forward_shapes(model, image_shape)
        except Exception:  # a network can fail in any way
            output = _forward(model, name, image_shape)
    finally:
        model.train(training)
    if not isinstance(output, Tensor) or output.shape != (_BATCH, classes):
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise RequestError(f"model {name} is no classifier: it gives {given}, not ({_BATCH}, {classes})")


def _forward_shapes(model: nn.Module, image_shape: tuple[int, int, int]) -> object:
    shapes = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    images = torch.empty(_BATCH, *image_shape, device="meta")
    with torch.no_grad():
        return torch.func.functional_call(model, shapes, (images,))


def _forward(model: nn.Module, name: str, image_shape: tuple[int, int, int]) -> object:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(torch.zeros(_BATCH, *image_shape))
    except Exception as error:
        raise _too_small(model, name, image_shape, error) from error


def _too_small(
    model: nn.Module, name: str, image_shape: tuple[int, int, int], error: Exception
) -> RequestError:
    channels, height, width = image_shape
    refused = f"model {name} cannot take pictures of {height}x{width}"
    for side in _SIDES:
        if side > max(height, width) and _takes(model, (channels, side, side)):
            return RequestError(f"{refused}, but those of {side}x{side}: give --image-size {side}")
    reason = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    return RequestError(f"{refused} ({reason}): give another --image-size")


def _takes(model: nn.Module, image_shape: tuple[int, int, int]) -> bool:
    try:
        _forward_shapes(model, image_shape)
    except Exception:
        return False
    return True
