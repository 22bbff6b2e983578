"""Weights as files: read in any format without executing anything in them, written atomically."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.errors import RequestError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn


_FILE_IN_RUN_FOLDER = "model.safetensors"
_SHOWN = 3


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy the weights of a file into a model, in place (views of the parameters stay views).

    Args:
        model: parameters and buffers are overwritten; unchanged if an error is raised.
        path: a safetensors file, a state dict as written by `torch.save` (also inside a checkpoint, under
            `state_dict` or `model`), or a run folder.

    Raises:
        RequestError: no such file, a damaged one, one that holds more than data, or weights of another model.
    """
    given = read_tensors(_file(path))
    expected = model.state_dict()
    missing = [name for name in expected if name not in given and not _is_tied(name, expected, given)]
    unexpected = [name for name in given if name not in expected]
    if missing or unexpected:
        raise RequestError(f"{path} holds weights of another model: {_differences(missing, unexpected)}")
    reshaped = [
        f"{name} is {_shape(tensor)} where the model has {_shape(expected[name])}"
        for name, tensor in given.items()
        if tensor.shape != expected[name].shape
    ]
    if reshaped:
        raise RequestError(f"{path} does not fit the model: {_first(reshaped)}")
    model.load_state_dict(given, strict=False)  # not strict: of tied tensors one is enough


def save_weights(
    model: nn.Module, path: Path, metadata: dict[str, str], claim: Unclaimed = UNCLAIMED
) -> None:
    """Write a model's parameters and buffers as safetensors, atomically, with texts; see `read_metadata`.

    Tied parameters, and parameters that are views of one vector, are written separately.

    Raises:
        RunError: the file cannot be written (no such folder, disk full, …).
        Superseded: another process has claimed the folder.
    """
    tensors = {
        # cloned, as safetensors refuses tensors that share memory
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }
    # Of a folder whose name is no UTF-8, the bytes that are not are kept as `\udcXX`.
    texts = {name: value.encode(errors="backslashreplace").decode() for name, value in metadata.items()}
    unfinished = claim.draft(path)
    try:
        unfinished.unlink(
            missing_ok=True
        )  # a run may have reserved its room so; the library writes another file
        unfinished.touch()
        usual_mode = unfinished.stat().st_mode
        save_file(tensors, unfinished, texts)
        unfinished.chmod(usual_mode)  # the library lets nobody but the owner read it
        _flush_to_disk(unfinished)
        claim.publish(path)
        _flush_to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        claim.check()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(f"cannot write the weights {path}: {reason}") from error
    finally:
        with suppress(OSError):  # there is none after success, nor where the folder is no folder
            unfinished.unlink()


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that `save_weights` stored in a file or run folder; none for files of other programs.

    Raises:
        RequestError: no such file, or a damaged one.
    """
    file = _file(path)
    if not is_safetensors(file):
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise RequestError(f"the weights file {file} is damaged ({error}): give another") from None


def _file(path: Path) -> Path:
    file = path / _FILE_IN_RUN_FOLDER if path.is_dir() else path
    if not file.is_file():
        raise RequestError(f"there are no weights at {file}: give a file, a run folder, or a pretrained name")
    return file


def _is_tied(name: str, expected: dict[str, Tensor], given: Iterable[str]) -> bool:
    """Whether a missing tensor is tied to one that is given; other programs write tied tensors once."""
    tensor = expected[name]
    return any(
        (other := expected.get(given_name)) is not None
        and tensor.numel() > 0
        and other.data_ptr() == tensor.data_ptr()
        and other.shape == tensor.shape
        and other.stride() == tensor.stride()
        for given_name in given
    )


def _differences(missing: list[str], unexpected: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} of the model's tensors are not there ({_first(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} of its tensors are not the model's ({_first(unexpected)})")
    return "; ".join(parts)


def _first(items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a single number"


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_CHECKPOINT_KEYS = ("state_dict", "model", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")  # put before every name by DataParallel and by torch.compile


def is_safetensors(file: Path) -> bool:
    """Whether a file is safetensors, by its first bytes: the length of a header, then the header, which is JSON.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return opened.read(9)[8:] == b"{"
    except OSError as error:
        raise RequestError(f"cannot read the weights file {file}: {error.strerror}") from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU, by their names in the model.

    The file is safetensors, or what `torch.save` wrote: a state dict, or a checkpoint that contains one.

    Raises:
        RequestError: damaged, no weights, or it contains objects that would have to be executed.
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
                f"{file} holds the object {refused[1]}, which is not data, and nothing was executed: "
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
