"""How much arithmetic belongs to each parameter of a network, counted in a forward pass on shapes alone.

layer            counted                    belongs to
convolution      2 · C_in · k² · C_out · H · W    its weight and bias, by their numbers
q kᵀ, a v        2 · tokens² · width              the parameters of the nearest module around that has some
norm, ReLU       nothing                          nobody
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def work_of_parameters(model: nn.Module, image_shape: tuple[int, int, int]) -> dict[str, float]:
    """Counts floating-point operations of the forward pass of one picture.

    Matrix products and convolutions count, as `torch.utils.flop_counter` has them; whatever else a layer does counts
    nothing. A module's operations belong to the parameters that it owns, by their numbers; to those below it if it
    owns none; to those of the nearest module around it if there are none below either.

    Args:
        model: on any device; left as it was.
        image_shape: (C, H, W) of a picture.

    Returns:
        Operations by the name of each trained parameter. All zero where the network cannot be run on shapes alone.
    """
    trained = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
    work = dict.fromkeys(trained, 0.0)
    for module, operations in _own_operations(model, image_shape).items():
        owners = _owners(module, trained)
        numbers = sum(trained[name] for name in owners)
        for name in owners:
            work[name] += operations * trained[name] / numbers
    return work


def _own_operations(model: nn.Module, image_shape: tuple[int, int, int]) -> Counter[str]:
    """Gives the operations of every module without those of the modules inside it, by its name."""
    shapes = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    images = torch.empty(1, *image_shape, device="meta")
    training = model.training
    model.eval()  # batch norm refuses a single picture in training
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            torch.func.functional_call(model, shapes, (images,))
    except Exception:  # a network can fail in any way on shapes alone
        return Counter()
    finally:
        model.train(training)
    return _without_inner({name: sum(found.values()) for name, found in counter.get_flop_counts().items()})


def _without_inner(counted: dict[str, int]) -> Counter[str]:
    """Takes what inner modules did off the modules around them; names then start below the model's own."""
    own: Counter[str] = Counter()
    for name, operations in counted.items():
        if name == "Global":
            continue
        own[name.partition(".")[2]] += operations
        around = name
        while "." in around:
            around = around.rpartition(".")[0]
            if around in counted:
                own[around.partition(".")[2]] -= operations
                break
    return own


def _owners(module: str, trained: dict[str, int]) -> list[str]:
    own = [name for name in trained if name.rpartition(".")[0] == module]
    if own:
        return own
    while True:
        below = [name for name in trained if name.startswith(f"{module}." if module else "")]
        if below or not module:
            return below
        module = module.rpartition(".")[0]
