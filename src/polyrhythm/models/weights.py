"""Weights as files: read in any format without executing anything in them, written atomically."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from polyrhythm.claim import UNCLAIMED, Unclaimed, open_new
from polyrhythm.errors import RequestError, RunError
from polyrhythm.run_files import check_in_run, exists_in_run
from polyrhythm.safetensors_file import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import nn


_FILE_IN_RUN_FOLDER = "model.safetensors"
_SUM = "sha256"
"""Metadata key of the tensors' checksum."""
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

    Tied parameters, and parameters that are views of one vector, are written separately. Tensors are not copied.

    Raises:
        RunError: the file cannot be written (no such folder, disk full, …).
        Superseded: another process has claimed the folder.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    # In a folder name that is not valid UTF-8, invalid bytes are kept as `\udcXX`.
    texts = {name: value.encode(errors="backslashreplace").decode() for name, value in metadata.items()}
    texts[_SUM] = tensors_digest(tensors)
    unfinished = claim.draft(path)
    try:
        with open_new(unfinished) as file:
            write_safetensors(file, tensors, texts)
        _flush_to_disk(unfinished)
        claim.publish(path)
        _flush_to_disk(path.parent)
    except OSError as error:
        claim.check()
        reason = error.strerror or error
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
            metadata = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise RequestError(f"the weights file {file} is damaged ({error}): give another") from None
    metadata.pop(_SUM, None)
    return metadata


def _file(path: Path) -> Path:
    file = path
    if path.is_dir():
        file = path / _FILE_IN_RUN_FOLDER
        if exists_in_run(file):
            check_in_run(file)
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
        tensors = load_file(file)
        with safe_open(file, framework="pt") as opened:
            known = (opened.metadata() or {}).get(_SUM)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"the weights file {file} is damaged ({error}): give another") from None
    if known is not None and known != tensors_digest(tensors):
        raise RequestError(
            f"the weights file {file} was changed after it was written (its checksum differs): give another"
        )
    return _without_wrapper(tensors)


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 of the names, types, shapes and bytes of tensors on the CPU, in hexadecimal digits."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}\n{tensor.dtype} {list(tensor.shape)}\n".encode(errors="backslashreplace"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_finite(model: nn.Module, path: Path) -> None:
    """Check that a trained network has numbers only.

    Raises:
        RequestError: a parameter or buffer has a value that is infinite or not a number; `path` names the network.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise RequestError(
                f"{path} holds values that are infinite or not a number (in {name}): the run has diverged, or the file "
                "is damaged; take an earlier checkpoint"
            )


def _read_pickled_data(file: Path) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # errors of the file are reported below
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
