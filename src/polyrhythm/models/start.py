"""Where a model's weights start: a file, a run folder, or weights that others trained, by name.

A name is one of the folder `pretrained`. Such weights come from a network for other classes: where only the head
differs, everything else is taken, and the head starts at zero (A. Kolesnikov and others, "Big Transfer", ECCV 2020,
arXiv:1912.11370). Some libraries draw so large a head at random that a short fine-tuning is spent on forgetting it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch

from polyrhythm.errors import RequestError
from polyrhythm.models.freezing import head_of
from polyrhythm.models.weights import load_weights
from polyrhythm.specs import build, choices

if TYPE_CHECKING:
    from torch import Tensor, nn

PRETRAINED = "polyrhythm.models.pretrained"


class Pretrained(Protocol):
    """What every module's `Config` in the folder `pretrained` can do."""

    @property
    def pixels(self) -> str:
        """How the pictures were normalised that the weights were trained on."""
        ...

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Gives weights by the names of the model that they are for; raises `RequestError` if they cannot be had."""
        ...


def pixels_of(weights: str | None) -> str | None:
    """Gives how pictures must be normalised for pretrained weights, and None for a file or a run folder."""
    if (
        weights is None
        or Path(weights).exists()
        or weights.partition("(")[0].strip() not in choices(PRETRAINED)
    ):
        return None
    return cast("Pretrained", build("pretrained weights", weights, PRETRAINED)).pixels


def start_from(model: nn.Module, weights: str) -> None:
    """Copies weights into a model, in place.

    Args:
        model: receives them.
        weights: a file or a run folder, else the name of pretrained weights, such as `efficientnet_lite0`.

    Raises:
        RequestError: there are none, or they are of another model.
    """
    name = weights.partition("(")[0].strip()
    if Path(weights).exists() or name not in choices(PRETRAINED):
        load_weights(model, Path(weights))
        return
    found = cast("Pretrained", build("pretrained weights", weights, PRETRAINED))
    load_all_but_head(model, found.tensors(model), name)


def load_all_but_head(model: nn.Module, tensors: dict[str, Tensor], origin: str) -> None:
    """Copies weights into a model, in place; the head becomes zero if the given one is for other classes.

    Args:
        model: unchanged if an error is raised.
        tensors: by name.
        origin: what to call them in the error.

    Raises:
        RequestError: something besides the head is missing, left over, or of another shape.
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
