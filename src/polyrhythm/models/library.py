"""Classifiers of torchvision and timm by name; both take seconds to import, so only when they are needed."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from polyrhythm.errors import RequestError, unknown
from polyrhythm.models.torchvision_operators import define_missing_operators

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

# the extra losses of these two are not plain cross-entropy on logits; the second key silences a notice that
# the library gives when nobody chooses
_INCEPTIONS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}

_DECIDED_ELSEWHERE = {
    "num_classes": "the number of classes follows from the data",
    "in_chans": "the number of channels follows from the data",
    "weights": "weights start at random, or are loaded from a file",
    "pretrained": "weights start at random, or are loaded from a file",
    "aux_logits": "auxiliary heads are left out",
}


@cache
def _torchvision_models() -> ModuleType:
    define_missing_operators()
    return import_module("torchvision.models")


@cache
def _timm() -> ModuleType:
    define_missing_operators()  # timm imports torchvision
    return import_module("timm")


def torchvision_names() -> list[str]:
    """Lists torchvision's classifiers for pictures, sorted."""
    models = _torchvision_models()
    return list(models.list_models(module=models))  # those for detection, video, … live in modules below


def timm_names() -> list[str]:
    """Lists timm's classifiers, sorted."""
    return list(_timm().list_models(exclude_filters="*_enc"))  # encoders of language models give no logits


def published_address(weights: str) -> str:
    """Gives the web address of weights that torchvision publishes for a classifier.

    Args:
        weights: by name, such as `ResNet18_Weights.IMAGENET1K_V1`, or `ResNet18_Weights.DEFAULT` for the best ones.

    Raises:
        RequestError: there are none of that name.
    """
    models = _torchvision_models()
    known: dict[str, Any] = {}
    for name in torchvision_names():
        kinds = models.get_model_weights(name)
        known |= {str(each): each for each in kinds} | {f"{kinds.__name__}.DEFAULT": kinds.DEFAULT}
    if weights not in known:
        raise unknown("weights of torchvision", weights, known)
    return str(known[weights].url)


def create_torchvision(name: str, classes: int, channels: int, arguments: dict[str, Any]) -> nn.Module:
    """Makes a classifier of torchvision with random weights.

    Args:
        name: one of `torchvision_names()`.
        classes: width of the output.
        channels: C of the pictures; if not 3, the first convolution is replaced.
        arguments: further keyword arguments of the library.

    Raises:
        RequestError: the library refuses the arguments.
    """
    every = {"weights": None, "num_classes": classes, **_INCEPTIONS.get(name, {})}
    model = _called(name, _torchvision_models().get_model, every, arguments)
    if channels != 3:
        _replace_first_convolution(model, channels)
    return model


def create_timm(name: str, classes: int, channels: int, arguments: dict[str, Any]) -> nn.Module:
    """Makes a model of timm with random weights.

    Args:
        name: one of `timm_names()`.
        classes: width of the output.
        channels: C of the pictures.
        arguments: further keyword arguments of the library.

    Raises:
        RequestError: the library refuses the arguments.
    """
    every = {"pretrained": False, "num_classes": classes, "in_chans": channels}
    return _called(name, _timm().create_model, every, arguments)


def _called(
    name: str, create: Callable[..., nn.Module], every: dict[str, Any], arguments: dict[str, Any]
) -> nn.Module:
    for key in arguments:
        if key in _DECIDED_ELSEWHERE:
            raise RequestError(f"model {name}: leave {key} out; {_DECIDED_ELSEWHERE[key]}")
    try:
        return create(name, **every, **arguments)
    except Exception as error:
        if not arguments:
            raise  # nobody's request: a fault of the library or of ours
        # which exception a bad argument raises is up to each of a thousand models
        reason = re.sub(r"\s+", " ", str(error)) or type(error).__name__
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise RequestError(f"model {name} cannot be made with {given}: {reason}") from error


def _replace_first_convolution(model: nn.Module, channels: int) -> None:
    path, old = next((path, part) for path, part in model.named_modules() if isinstance(part, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        old.out_channels,
        kernel_size=old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        dilation=old.dilation,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    # each model has its own idea of how large first weights are; keep to it
    nn.init.normal_(new.weight, std=old.weight.std().item())
    if new.bias is not None and old.bias is not None:
        nn.init.zeros_(new.bias)
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
