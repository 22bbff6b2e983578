"""Models by name: the project's own networks, and the classifiers of torchvision and timm.

Both libraries take seconds to import, so they are imported on first use. Whether a network can take images of a size
is checked at once, not in the first training step.

torchvision must import even where its compiled operators cannot be loaded. A torchvision built for CUDA next to a
CPU-only torch fails at import, because its Python code annotates the operators `torchvision::nms` and
`torchvision::qnms`, which only its compiled library would register. Classifiers use neither, so it is enough that
their schemas exist.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError, unknown
from polyrhythm.models.architectures import Architecture
from polyrhythm.specs import Spec, build, choices, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


_ARCHITECTURES = "polyrhythm.models.architectures"


def create_model(
    spec: str | Spec | nn.Module, *, classes: int, image_shape: tuple[int, int, int]
) -> nn.Module:
    """Return a classifier with random weights from torch's global generator, which the caller seeds.

    A name is looked up among the project's own networks, then in torchvision, then in timm; a prefix, as in
    `timm.resnet18`, chooses the library. The keys of a spec are the fields of an own network, or keyword
    arguments of the library. A module is returned unchanged.

    Returns:
        A module that maps images (B, C, H, W), float32, to logits (B, classes).

    Raises:
        RequestError: unknown name or key, or the network cannot take images of that size.
    """
    if isinstance(spec, nn.Module):
        return spec
    library, parsed = _read(spec)
    if not library and parsed.name in choices(_ARCHITECTURES):
        return cast("Architecture", build("model", parsed, _ARCHITECTURES)).create(classes, image_shape)
    model = _from_library(library, parsed, classes, image_shape[0])
    check_image_size(model, parsed.name, classes, image_shape)
    return model


def model_names() -> list[str]:
    """Return every name that `create_model` knows, the project's own first.

    A model of both libraries is listed twice: `resnet18` (torchvision's) and `timm.resnet18`.
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


_SIDES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512)
# Two samples: a network that squeezes its output would lose the batch dimension of one.
_BATCH = 2


def check_image_size(model: nn.Module, name: str, classes: int, image_shape: tuple[int, int, int]) -> None:
    """Check that a network on the CPU maps images (B, C, H, W) to logits (B, classes).

    The forward pass runs on the meta device, which computes nothing and draws no random numbers. Some networks cannot
    run there, so a failure counts only if an ordinary forward pass fails too.

    Raises:
        RequestError: it does not; `name` is for the message.
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
        raise RequestError(
            f"model {name} is not a classifier: its output is {given}, not ({_BATCH}, {classes})"
        )


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
    refused = f"model {name} does not support images of {height}x{width}"
    for side in _SIDES:
        if side > max(height, width) and takes(model, (channels, side, side)):
            return RequestError(f"{refused}, but those of {side}x{side}: give --image-size {side}")
    reason = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    return RequestError(f"{refused} ({reason}): give another --image-size")


def takes(model: nn.Module, image_shape: tuple[int, int, int]) -> bool:
    """Whether a network maps images (B, C, H, W) of that shape to anything, on the meta device."""
    try:
        _forward_shapes(model, image_shape)
    except Exception:
        return False
    return True


# the extra losses of these two are not plain cross-entropy on logits; the second key silences a notice that
# the library prints by default
_INCEPTIONS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}

_DECIDED_ELSEWHERE = {
    "num_classes": "the number of classes follows from the data",
    "in_chans": "the number of channels follows from the data",
    "weights": "weights start at random, or are loaded from a file",
    "pretrained": "weights start at random, or are loaded from a file",
    "aux_logits": "auxiliary heads are omitted",
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
    """Return the names of torchvision's classifiers, sorted."""
    models = _torchvision_models()
    return list(models.list_models(module=models))  # those for detection, video, … live in modules below


def timm_names() -> list[str]:
    """Return the names of timm's classifiers, sorted."""
    return list(_timm().list_models(exclude_filters="*_enc"))  # encoders of language models give no logits


def published_address(weights: str) -> str:
    """Return the URL of torchvision's weights, such as `ResNet18_Weights.IMAGENET1K_V1` or `ResNet18_Weights.DEFAULT`.

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
    """Return a classifier of torchvision with random weights; its first convolution is replaced if `channels` is not 3.

    Raises:
        RequestError: the library refuses the arguments.
    """
    every = {"weights": None, "num_classes": classes, **_INCEPTIONS.get(name, {})}
    model = _called(name, _torchvision_models().get_model, every, arguments)
    if channels != 3:
        _replace_first_convolution(model, channels)
    return model


def create_timm(name: str, classes: int, channels: int, arguments: dict[str, Any]) -> nn.Module:
    """Return a model of timm with random weights; raise `RequestError` if the library refuses the arguments."""
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
            raise  # not the user's request: a fault of the library or of ours
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


_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def define_missing_operators() -> torch.library.Library | None:
    """Define the schemas that torchvision needs at import, if its compiled library cannot; call it before the import.

    The returned library object must stay alive for the definitions to stay; None if nothing was missing.
    """
    if "torchvision" in sys.modules or _compiled_library_loads():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


def _compiled_library_loads() -> bool:
    # a schema that is defined here and then registered by the library too is fatal, so the library goes first
    package = find_spec("torchvision")
    folders = package.submodule_search_locations if package else None
    for folder in folders or []:
        for file in (*Path(folder).glob("_C*.so"), *Path(folder).glob("_C*.pyd")):
            try:
                torch.ops.load_library(file)
            except OSError:
                continue
            return True
    return False
