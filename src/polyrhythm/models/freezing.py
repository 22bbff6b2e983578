"""Frozen parts of a network: parameters that are not trained, and statistics that stand still.

J. Yosinski, J. Clune, Y. Bengio, H. Lipson, "How transferable are features in deep neural networks?", NIPS 2014.
"""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError, unknown


def freeze(model: nn.Module, what: str) -> None:
    """Freezes parts of a model, in place.

    A batch norm whose parameters are all frozen works with its statistics as they are, in training too.

    Args:
        model: a classifier.
        what: `none`; `body`, all but the head (`head_of`); `norms`, all batch norms; or names of modules or
            parameters with commas between.

    Raises:
        RequestError: there is nothing of that name, or nothing is left to train.
    """
    if what == "none":
        return
    for name in _named(model, what):
        model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(f"--freeze {what} leaves nothing to train: leave the head out")
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and own and not any(each.requires_grad for each in own):
            module.register_forward_pre_hook(_stand_still)


def head_of(model: nn.Module) -> str:
    """Names the head: the last layer with weights, which gives the class scores.

    Raises:
        RequestError: the network has no such layer.
    """
    layers: list[str] = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    if not layers:
        raise RequestError(
            f"{type(model).__name__} has no fully connected or convolutional layer, so it has no head"
        )
    return layers[-1]


def _named(model: nn.Module, what: str) -> list[str]:
    names: list[str] = [name for name, _ in model.named_parameters()]
    if what == "norms":
        norms = [f"{name}." for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        return [name for name in names if name.startswith(tuple(norms))]
    if what == "body":
        head = f"{head_of(model)}."
        return [name for name in names if not name.startswith(head) and name != head]
    wanted = [part.strip() for part in what.split(",") if part.strip()]
    for part in wanted:
        if not any(_is_below(name, part) for name in names):
            raise unknown(
                "part of the model",
                part,
                chain(["body", "norms"], (name for name, _ in model.named_children())),
            )
    return [name for name in names if any(_is_below(name, part) for part in wanted)]


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _stand_still(module: nn.Module, inputs: object) -> None:
    module.eval()
