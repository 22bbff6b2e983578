"""Makes a model from its name."""

from __future__ import annotations

import re
from typing import cast

from torch import nn

from polyrhythm.errors import unknown
from polyrhythm.models.architectures import Architecture
from polyrhythm.models.library import create_timm, create_torchvision, timm_names, torchvision_names
from polyrhythm.models.picture_size import check_picture_size
from polyrhythm.specs import Spec, build, choices, parse

_ARCHITECTURES = "polyrhythm.models.architectures"


def create_model(
    spec: str | Spec | nn.Module, *, classes: int, image_shape: tuple[int, int, int]
) -> nn.Module:
    """Makes a classifier with random weights from torch's global generator, which the caller seeds.

    A name is looked for among the project's own networks, then in torchvision, then in timm; a prefix, as in
    `timm.resnet18`, chooses the library. The keys of a spec are the fields of an own network, or keyword
    arguments of the library.

    Args:
        spec: a spec or its text, such as `lenet5(widths=[16, 32])`; a module is given back as it is.
        classes: number of classes.
        image_shape: (C, H, W) of a picture.

    Returns:
        A module that maps pictures (B, C, H, W), float32, to logits (B, classes).

    Raises:
        RequestError: unknown name or key, or the network cannot take pictures of that size.
    """
    if isinstance(spec, nn.Module):
        return spec
    library, parsed = _read(spec)
    if not library and parsed.name in choices(_ARCHITECTURES):
        return cast("Architecture", build("model", parsed, _ARCHITECTURES)).create(classes, image_shape)
    model = _from_library(library, parsed, classes, image_shape[0])
    check_picture_size(model, parsed.name, classes, image_shape)
    return model


def model_names() -> list[str]:
    """Lists every name that `create_model` knows, the project's own first.

    A model that both libraries have stands there twice: `resnet18` (torchvision's) and `timm.resnet18`.
    """
    own, torchvision = list(choices(_ARCHITECTURES)), torchvision_names()
    taken = {*own, *torchvision}
    return own + torchvision + [f"timm.{name}" if name in taken else name for name in timm_names()]


def _read(spec: str | Spec) -> tuple[str, Spec]:
    if isinstance(spec, Spec):
        return "", spec
    prefix = re.match(r"\s*(torchvision|timm)\.", spec)
    return (prefix[1], parse(spec[prefix.end() :])) if prefix else ("", parse(spec))


def _from_library(library: str, spec: Spec, classes: int, channels: int) -> nn.Module:
    if library in ("", "torchvision") and spec.name in torchvision_names():
        return create_torchvision(spec.name, classes, channels, spec.arguments)
    if library in ("", "timm") and spec.name in timm_names():
        return create_timm(spec.name, classes, channels, spec.arguments)
    known = {"torchvision": torchvision_names, "timm": timm_names}.get(library, model_names)()
    raise unknown(f"{library} model".strip(), spec.name, known)
