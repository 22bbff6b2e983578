"""Saved states of users' loops as folders, and the checkpoints among them.

A folder has the format of `torch.distributed.checkpoint`, which other tools read:

    FOLDER/.metadata          torch's index: file and position of each tensor
    FOLDER/__0_0.distcp       all tensors: `model.conv1.weight`, `states.0.tensors.buffer.bn1.running_mean`, …
    FOLDER/polyrhythm.json    index of Polyrhythm: the same positions, and all other values

torch's own index is pickled. It is written for other tools; Polyrhythm reads its own index, and each tensor with
`weights_only`, so that no code of a folder is executed. A folder appears whole or not at all. Checkpoints that are
written at an interval are folders `step-00000100` of one folder.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.control_message import checked
from polyrhythm.errors import RequestError, RunError, printable
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.run_files import MOST_LISTING_BYTES, open_in_run, read_json_in_run
from polyrhythm.strategies.state import State
from polyrhythm.training.checkpoint import flush

INDEX = "polyrhythm.json"
_TENSOR = "tensor at"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class LoopSnapshot:
    """State of a loop's run at one moment.

    Attributes:
        epoch: epoch with which a resumed run begins.
        step: steps done by the coordinator.
        state: state of the run; see `run_state`.
    """

    epoch: int
    step: int
    state: dict[str, Any]


def with_ranks(
    state: dict[str, Any], workers: dict[int, WorkerState], servers: list[State]
) -> dict[str, Any]:
    """Return the state of a run with those of all workers and servers."""
    return state | {
        "states": {
            str(worker): {"tensors": held.tensors(), "facts": held.facts()}
            for worker, held in sorted(workers.items())
        },
        "servers": [{"tensors": tensors, "facts": facts} for tensors, facts in servers],
    }


class LoopStorage:
    """Folder with the checkpoints of a loop.

    Args:
        folder: folder of the checkpoints.
        keep: number of newest checkpoints to keep.
        resumed: name of the checkpoint from which this run has resumed, which is kept for replacements; "": none.

    Attributes:
        name: name of the place, for messages.
        keeps_best: False: a loop's tests are its own.
    """

    name = "the disk"
    keeps_best = False

    def __init__(self, folder: Path, keep: int, resumed: str) -> None:
        self._folder, self._keep, self._resumed = folder, keep, resumed

    def save(self, snapshot: LoopSnapshot) -> str:
        """Write a checkpoint, whole or not at all, and remove old ones; return its path.

        Raises:
            RunError: the system could not write it; older ones are untouched.
        """
        path = self._folder / f"step-{snapshot.step:08d}"
        write_folder(snapshot.state, path)
        names = saved_in(self._folder)
        beyond = [name for name in names if name > path.name]  # of a run that was resumed from before them
        kept = [name for name in names if name not in beyond][: self._keep]
        for name in names:
            if name not in (*kept, self._resumed):
                shutil.rmtree(self._folder / name, ignore_errors=True)
        for half_written in self._folder.glob(".step-*"):  # by a run that was killed
            shutil.rmtree(half_written, ignore_errors=True)
        return str(path)

    def keep_best(self, step: int, top1: float) -> None:
        """Do nothing."""


def saved_in(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, the newest first; only `read_folder` checks them."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(names, key=lambda name: int(name.removeprefix("step-")), reverse=True)


def newest_in(folder: Path) -> tuple[str, str]:
    """Return the name of the newest checkpoint in a folder that can be read, and a remark on damaged ones.

    Both are empty where there is none.
    """
    remark = ""
    for name in saved_in(folder):
        try:
            read_folder(folder / name)
        except RequestError as error:
            remark = remark or f"{error}; an older checkpoint is used"
            continue
        return name, remark
    return "", ""


def write_folder(state: dict[str, Any], folder: Path) -> None:
    """Write a state; a folder of that name is replaced.

    Raises:
        RequestError: the state holds something that is neither a tensor nor a plain value, or the folder is not ours.
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
            warnings.simplefilter("ignore")  # there is no process group, and none is needed
            metadata = checkpoint.save(
                tensors, storage_writer=checkpoint.FileSystemWriter(draft), no_dist=True
            )
        places = {
            index.fqn: [info.relative_path, info.offset, info.length]
            for index, info in metadata.storage_data.items()
        }
        text = json.dumps({"state": plain, "places": places})
        (draft / INDEX).write_text(text, encoding="utf-8")
        for written in (draft / INDEX, draft):
            flush(written)
        if folder.exists():
            os.replace(folder, before)
        os.replace(draft, folder)
        flush(folder.parent)
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
        found = read_json_in_run(folder / INDEX, MOST_LISTING_BYTES)
        tensors = {
            name: _read_tensor(folder, *place)
            for name, place in checked(found["places"], dict[str, tuple[str, int, int]]).items()
        }
        return checked(_with_tensors(found["state"], tensors), dict[str, Any])  # type: ignore[no-any-return]
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, EOFError) as error:
        reason = printable(" ".join(str(error).split()))
        raise RequestError(f"{folder} is damaged ({reason:.200}): give another") from None


def _read_tensor(folder: Path, name: str, offset: int, length: int) -> Tensor:
    """Return a tensor of a file in a folder; the file is a regular one, and nothing in it is executed."""
    if Path(name).name != name:
        raise ValueError(f"{name} is not in it")
    with open_in_run(folder / name, most_bytes=0) as file:
        if not 0 <= offset <= offset + length <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{name} is shorter than its index requires")
        file.seek(offset)
        content = io.BytesIO(file.read(length))
    try:
        value = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} holds something else than a tensor")
    return value


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
