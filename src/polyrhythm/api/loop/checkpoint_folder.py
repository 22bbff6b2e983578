"""A run's state as a folder in the format of `torch.distributed.checkpoint`, which other tools read.

    FOLDER/.metadata          of torch's: which tensor is where
    FOLDER/__0_0.distcp       all tensors: `model.conv1.weight`, `states.0.tensors.buffer.bn1.running_mean`, …
    FOLDER/polyrhythm.json    of ours: the same places, and everything that is no tensor

torch's own index is pickled. It is written for others; what is read here is ours, and each tensor with
`weights_only`, so that nothing of a folder is executed. A folder appears whole or not at all.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import RequestError, RunError

INDEX = "polyrhythm.json"
_TENSOR = "tensor at"


def write_folder(state: dict[str, Any], folder: Path) -> None:
    """Write a state; a folder of that name is replaced.

    Raises:
        RequestError: the state holds something that is neither a tensor nor a plain value, or the folder is another's.
        RunError: the system could not write it.
    """
    from torch.distributed import checkpoint  # takes a second

    if folder.exists() and not (folder / INDEX).is_file():
        raise RequestError(f"{folder} exists and holds no saved state: name another folder")
    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(state, "", tensors)
    draft, before = (folder.parent / f".{folder.name}.{kind}" for kind in ("partial", "before"))
    try:
        for left in (draft, before):
            shutil.rmtree(left, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group, which it can do without
            metadata = checkpoint.save(
                tensors, storage_writer=checkpoint.FileSystemWriter(draft), no_dist=True
            )
        places = {
            index.fqn: [info.relative_path, info.offset, info.length]
            for index, info in metadata.storage_data.items()
        }
        text = json.dumps({"state": plain, "places": places})
        (draft / INDEX).write_text(text, encoding="utf-8")
        if folder.exists():
            os.replace(folder, before)
        os.replace(draft, folder)
        shutil.rmtree(before, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from error


def read_folder(folder: Path) -> dict[str, Any]:
    """Read the state that `write_folder` wrote.

    Raises:
        RequestError: there is none, or it is damaged.
    """
    before = folder.parent / f".{folder.name}.before"
    if not folder.exists() and (before / INDEX).is_file():  # killed between the two renames
        folder = before
    if not (folder / INDEX).is_file():
        raise RequestError(
            f"{folder} holds no {INDEX}: give a folder that group.save has written; other checkpoints of torch's are "
            "read by torch.distributed.checkpoint"
        )
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        tensors = {}
        for name, (path, offset, length) in found["places"].items():
            if Path(path).name != path:
                raise ValueError(f"{path} is not in it")
            with (folder / path).open("rb") as file:
                file.seek(offset)
                content = io.BytesIO(file.read(length))
            tensors[name] = torch.load(content, map_location="cpu", weights_only=True)
        state = _with_tensors(found["state"], tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{folder} is damaged ({reason:.120}): give another") from None
    if not isinstance(state, dict):
        raise RequestError(f"{folder} is damaged (its index is no object): give another")
    return state


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value with the names of its tensors in their places, and note them."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{name} has keys that are no texts, which a folder cannot hold")
        return {
            key: _without_tensors(part, f"{name}.{key}" if name else key, tensors)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_tensors(part, f"{name}.{number}", tensors) for number, part in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RequestError(
        f"{name} is a {type(value).__name__}, which a folder cannot hold: keep it out of the state"
    )


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(part, tensors) for key, part in value.items()}
    return [_with_tensors(part, tensors) for part in value] if isinstance(value, list) else value
