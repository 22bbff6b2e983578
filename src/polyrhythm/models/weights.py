"""Weights as files: read without executing anything in them, written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.errors import RequestError, RunError
from polyrhythm.models.weights_formats import is_safetensors, read_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor, nn

_FILE_IN_RUN_FOLDER = "model.safetensors"
_SHOWN = 3


def load_weights(model: nn.Module, path: Path) -> None:
    """Copies the weights of a file into a model, in place (views of the parameters stay views).

    Args:
        model: what receives them, parameters and buffers; unchanged if an error is raised.
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
    """Writes a model's parameters and buffers as safetensors; the file appears whole or not at all.

    Args:
        model: may have tied parameters, or views of one vector as parameters: each is written by itself.
        path: the file; an older one is replaced.
        metadata: texts to keep beside the weights; see `read_metadata`.
        claim: to the folder.

    Raises:
        RunError: it cannot be written (no such folder, disk full, …).
        Superseded: the folder is another's.
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
    """Gives the texts that `save_weights` kept beside the weights; none for files that others wrote.

    Args:
        path: a file of weights, or a run folder.

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
    """Tells whether a tensor is another name of one that is given; other programs write such tensors once."""
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
