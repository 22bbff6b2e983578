"""Fine-tuning: initial weights, frozen parts, and learning rates per stage.

Weights are read from a file, a run folder, or by name from the folder `pretrained`. Pretrained weights belong to a
network for other classes: if only the head differs, everything else is loaded, and the head starts at zero (A.
Kolesnikov and others, "Big Transfer", ECCV 2020, arXiv:1912.11370). Some libraries initialize the head with such large
numbers that a short fine-tuning is spent on unlearning them.

Frozen parts are parameters that are not trained, and statistics that stay fixed: J. Yosinski, J. Clune, Y.
Bengio, H. Lipson, "How transferable are features in deep neural networks?", NIPS 2014.

Discriminative learning rates: the nearer a stage is to the pixels, the slower it learns. J. Howard, S. Ruder,
"Universal language model fine-tuning for text classification", ACL 2018, arXiv:1801.06146.

    lr_s = lr d^(S - 1 - s),    s = 0 … S-1 the stages from the pixels to the head

d is `decay` (the paper's 1/2.6). A stage is a child of the network; each member of a child that is a sequence is a
stage of its own.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError, unknown
from polyrhythm.models.weights import load_weights
from polyrhythm.specs import build, choices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


PRETRAINED = "polyrhythm.models.pretrained"


class Pretrained(Protocol):
    """Interface of the `Config` in every module of the folder `pretrained`."""

    @property
    def pixels(self) -> str:
        """Pixel normalization that the weights were trained with."""
        ...

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights by the parameter names of `model`; raise `RequestError` if they are not available."""
        ...


def pixels_of(weights: str | None) -> str | None:
    """Return the normalization of images for pretrained weights; None for a file or a run folder."""
    if (
        weights is None
        or os.path.exists(weights)
        or weights.partition("(")[0].strip() not in choices(PRETRAINED)
    ):
        return None
    return cast("Pretrained", build("pretrained weights", weights, PRETRAINED)).pixels


def start_from(model: nn.Module, weights: str) -> None:
    """Copy weights into a model, in place: of a file, a run folder, or by name, such as `efficientnet_lite0`.

    Raises:
        RequestError: there are no such weights, or they belong to another model.
    """
    name = weights.partition("(")[0].strip()
    if os.path.exists(weights) or name not in choices(PRETRAINED):
        load_weights(model, Path(weights))
        return
    found = cast("Pretrained", build("pretrained weights", weights, PRETRAINED))
    load_all_but_head(model, found.tensors(model), name)


def load_all_but_head(model: nn.Module, tensors: dict[str, Tensor], origin: str) -> None:
    """Copy weights into a model, in place; the head becomes zero if the given one is for other classes.

    Raises:
        RequestError: a tensor outside the head is missing, unexpected, or of another shape; nothing was changed.
    """
    expected, head = model.state_dict(), f"{head_of(model)}."
    wrong = [
        name
        for name in expected.keys() | tensors.keys()
        if name not in expected or name not in tensors or expected[name].shape != tensors[name].shape
    ]
    foreign = sorted(name for name in wrong if not name.startswith(head))
    if foreign:
        raise RequestError(
            f"the weights {origin} are of another model: {len(foreign)} of their tensors differ, such as {foreign[0]}; "
            "choose the model that they were made for"
        )
    model.load_state_dict({**tensors, **{name: torch.zeros_like(expected[name]) for name in wrong}})


def freeze(model: nn.Module, what: str) -> None:
    """Freeze parts of a model, in place.

    A batch norm with all parameters frozen uses its running statistics unchanged, in training too.

    Args:
        model: a classifier.
        what: `none`; `body`, all but the head (`head_of`); `norms`, all batch norms; or names of modules or
            parameters separated by commas, `norms` among them.

    Raises:
        RequestError: there is nothing of that name, or nothing would remain to train.
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
            module.register_forward_pre_hook(_use_running_statistics)


def head_of(model: nn.Module) -> str:
    """Return the name of the head: the last layer with weights, which computes the class scores.

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
    if "norms" in wanted:
        wanted.remove("norms")
        return list(dict.fromkeys([*_named(model, "norms"), *_named(model, ",".join(wanted))]))
    for part in wanted:
        if part in ("none", "norms", "body"):
            raise RequestError(f"freeze {what!r:.100}: {part} cannot be combined with parts")
        if not any(_is_below(name, part) for name in names):
            raise unknown(
                "part of the model",
                part,
                chain(["body", "norms"], (name for name, _ in model.named_children())),
            )
    return [name for name in names if any(_is_below(name, part) for part in wanted)]


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _use_running_statistics(module: nn.Module, inputs: object) -> None:
    module.eval()


def stages(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the trained parameters of every stage, from the pixels to the head; a tied one belongs to the first."""
    seen: set[nn.Parameter] = set()
    found = []
    for module in _rows(model):
        own = [each for each in module.parameters() if each.requires_grad and each not in seen]
        seen.update(own)
        if own:
            found.append(own)
    left = [each for each in model.parameters() if each.requires_grad and each not in seen]
    return [left, *found] if left else found


def graded(model: nn.Module, rate: float, decay: float) -> list[Any]:
    """Return the first argument of an optimizer: the parameters, or groups of them with a learning rate each.

    `rate` is that of the last stage; each stage's rate is `decay` times that of the stage after it.
    """
    if decay == 1:
        return list(model.parameters())
    parts = stages(model)
    return [
        {"params": part, "lr": rate * decay ** (len(parts) - 1 - place)} for place, part in enumerate(parts)
    ]


def _rows(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        inside = [part for part in child.children() if any(True for _ in part.parameters())]
        if isinstance(child, nn.Sequential | nn.ModuleList) and len(inside) > 1:
            yield from inside
        else:
            yield child
