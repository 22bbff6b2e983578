"""Copies of a run's checkpoints at a location of fsspec (an object store, SFTP, another disk), to resume elsewhere.

    RUN/config.yaml, events.jsonl, …          ─▶ URL/config.yaml, …          with each checkpoint
    RUN/checkpoints/step-00000100.safetensors ─▶ URL/checkpoints/step-00000100.safetensors

A checkpoint that was cut off is recognized by its checksum, as any damaged one, and the one before is used. The other
files are sent under another name and then renamed, `config.yaml` last: without it there is no copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import RequestError, RunError, printable
from polyrhythm.events import CheckpointSaved
from polyrhythm.locations import file_system

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_FILES = ("events.jsonl", "data.json", "environment.json", "stages.json", "config.yaml")
"""Files of a run folder that resuming reads, in the order of their copies."""
_CHECKPOINTS = "checkpoints"


class Mirror:
    """Location of the copies; a place of checkpoints for `Archivist`.

    Args:
        folder: run folder.
        url: location, as fsspec reads it.
        keep: number of newest checkpoints to keep there.

    Attributes:
        name: name of the place, for messages.
        keeps_best: False: the newest checkpoints are copied.
    """

    keeps_best = False

    def __init__(self, folder: Path, url: str, keep: int) -> None:
        self.name = f"the mirror {url}"
        self._folder, self._url, self._keep = folder, url, keep

    def save(self, snapshot: CheckpointSaved) -> str:
        """Copy a checkpoint and the files needed to resume from it, and remove old copies; return its location.

        Raises:
            RunError: the location cannot be written.
        """
        name = Path(snapshot.path).name
        try:
            system, root = file_system(self._url, "mirror")
            target = f"{root}/{_CHECKPOINTS}"
            system.makedirs(target, exist_ok=True)
            system.put_file(str(self._folder / snapshot.path), f"{target}/{name}")
            for file in _FILES:
                if (self._folder / file).is_file():
                    system.put_file(str(self._folder / file), f"{root}/{file}.partial")
                    system.mv(f"{root}/{file}.partial", f"{root}/{file}")
            for other in _names(system, target)[self._keep :]:
                system.rm_file(f"{target}/{other}")
        except Exception as error:  # every file system has errors of its own
            reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))
            raise RunError(f"cannot copy checkpoint {name} to {self.name} ({reason:.200})") from error
        return f"{self._url}/{_CHECKPOINTS}/{name}"

    def keep_best(self, step: int, top1: float) -> None:
        """Do nothing."""


def fetch_run(url: str, folder: Path) -> bool:
    """Make a run folder from its copy, if the folder does not exist; return whether there was a copy.

    Args:
        url: location of the copy.
        folder: run folder; missing or empty. It appears whole or not at all.

    Raises:
        RequestError: the location cannot be read.
    """
    system, root = file_system(url, "mirror")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        if not system.exists(f"{root}/{_FILES[-1]}"):
            return False
        (draft / _CHECKPOINTS).mkdir()
        for name in _names(system, f"{root}/{_CHECKPOINTS}"):
            system.get_file(f"{root}/{_CHECKPOINTS}/{name}", str(draft / _CHECKPOINTS / name))
        for file in _FILES:
            if system.exists(f"{root}/{file}"):
                system.get_file(f"{root}/{file}", str(draft / file))
        draft.chmod(0o755)
        with suppress(OSError):  # another rank of this host has made it
            os.replace(draft, folder)
        return True
    except Exception as error:
        reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))
        raise RequestError(
            f"cannot read the mirror {url} ({reason:.200}): make it reachable, or leave --checkpoint-mirror out"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _names(system: AbstractFileSystem, folder: str) -> list[str]:
    """Return the names of the checkpoints in a folder, the newest first."""
    names = [Path(path).name for path in system.ls(folder, detail=False)] if system.exists(folder) else []
    found = [name for name in names if name.startswith("step-") and name.endswith(".safetensors")]
    return sorted(found, key=lambda name: (len(name), name), reverse=True)
