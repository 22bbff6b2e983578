"""Batches of a single picture, of which batch normalisation may have no statistics.

    layer                 sees of one picture     normalises it in training by
    BatchNorm2d, 7 x 7    49 numbers a channel    their mean and variance, as ever
    BatchNorm2d, 1 x 1    one number a channel    its running statistics, which stay as they are
    BatchNorm1d           one number a channel    the same

One number has no variance, and torch refuses it. Such batches come about by themselves: as the ragged last one of an
epoch, or where the share of a lost worker is dealt out among others. Where already the first batch is one, nothing
would ever be normalised, and the run is refused before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError


@contextmanager
def by_running_statistics(model: nn.Module) -> Iterator[None]:
    """Lets layers that see one number a channel normalise by their running statistics, if they have some.

    Args:
        model: in training; changed only meanwhile.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    handles = [layer.register_forward_pre_hook(_as_tested) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.train()


def check_learns_alone(make_model: Callable[[], nn.Module], image_shape: tuple[int, ...]) -> None:
    """Refuses a network that takes statistics of a batch of one picture, and finds one number a channel.

    Args:
        make_model: makes it, on the CPU.
        image_shape: (C, H, W).

    Raises:
        RequestError: so it is.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = make_model().train()
        try:
            model(torch.zeros(1, *image_shape))
        except ValueError as error:
            model(torch.zeros(2, *image_shape))
            raise RequestError(
                f"a worker's batches have a single picture, of which batch normalisation has no statistics ({error}): "
                "ask for a larger batch_size, or for fewer workers"
            ) from None


def _as_tested(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0]
    if values.numel() == values.shape[1]:
        layer.eval()
