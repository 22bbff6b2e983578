"""Reads the tensors of a weights file, in whatever format it is, as data only: nothing in it is executed."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

_CHECKPOINT_KEYS = ("state_dict", "model", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")  # put before every name by DataParallel and by torch.compile


def is_safetensors(file: Path) -> bool:
    """Tells a safetensors file by its first bytes: the length of a header, then the header, which is JSON.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return opened.read(9)[8:] == b"{"
    except OSError as error:
        raise RequestError(f"cannot read the weights file {file}: {error.strerror}") from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file, on the CPU, by their names in the model.

    Args:
        file: safetensors, or what `torch.save` made of a state dict or of a checkpoint that holds one.

    Raises:
        RequestError: damaged, no weights, or objects inside that would have to be executed.
    """
    if not is_safetensors(file):
        return _without_wrapper(_state_dict(file, _read_pickled_data(file)))
    try:
        return _without_wrapper(load_file(file))
    except (OSError, SafetensorError) as error:
        raise RequestError(f"the weights file {file} is damaged ({error}): give another") from None


def _read_pickled_data(file: Path) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # what is wrong with the file is said below
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
        if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise RequestError(
                f"{file} holds the object {refused[1]}, which is no data, and nothing was executed: "
                "save the state dict alone, best as safetensors"
            ) from None
        raise RequestError(f"{file} is damaged or no weights file: give another") from None


def _state_dict(file: Path, content: Any) -> dict[str, Tensor]:
    if isinstance(content, dict):
        inner = next(
            (content[key] for key in _CHECKPOINT_KEYS if isinstance(content.get(key), dict)), content
        )
        if inner and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in inner.items()):
            return dict(inner)
    raise RequestError(
        f"{file} holds no weights: expected tensors by name, alone or under {' or '.join(_CHECKPOINT_KEYS)}"
    )


def _without_wrapper(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if tensors and all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors
