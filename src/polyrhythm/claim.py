"""Ownership of a run folder: of several starts of a run, only the latest writes into it.

Every start writes its files in a staging folder of its own and moves them to their place. A later start first
removes the staging folders of all earlier ones:

    start 1   .start-00000001-9f…/step-…  ── rename ─▶ checkpoints/step-…
    start 2      removes it ────┐   .start-00000002-41…/
    start 1                     ✗ ── rename: there is no such file; nothing of start 1 arrives any more

A folder that is deleted, renamed or unmounted during a run is created again if no other run uses its place, and the
run continues in it.

So the file system itself decides atomically between a late writer and its replacement, and no remaining file can block
a later start: the staging folder of a killed process is removed like any other. That holds on network file systems,
too, where the server renames; no lock is taken. Special cases there:

    an answer is lost, and the request sent again   the file is gone from its old name: it is looked for at the new one
    a handle is stale (another host removed it)     it is looked up again
    a removed file is still open                    it stays as .nfs…, its folder too; a later start removes both
    what this host knows of a folder is old         an earlier start ends later than at once, and still changes nothing
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from polyrhythm.errors import RunError

_STAGING = re.compile(r"\.start-(\d{8})-[0-9a-f]{8}")
_TAKEN = ".taken-"
_NONCE_BYTES = 4
_TRIES, _LOOKS = 100, 3


def move(draft: Path, path: Path) -> None:
    """Rename a file; an existing one is replaced.

    Raises:
        OSError: the file system refused.
    """
    moved = draft.stat()
    try:
        draft.replace(path)
    except FileNotFoundError:
        found = path.stat()
        if (found.st_ino, found.st_dev) != (moved.st_ino, moved.st_dev):
            raise


def _is_folder(path: Path) -> bool:
    """Return whether there is such a folder, as far as can be seen."""
    for _ in range(_LOOKS):
        try:
            return stat.S_ISDIR(path.stat().st_mode)
        except OSError as error:
            if error.errno != errno.ESTALE:
                return False
    return False


def open_new(draft: Path) -> BinaryIO:
    """Open a draft for writing; an earlier draft of this process is replaced, and links are not followed.

    Raises:
        OSError: the file system refused.
    """
    draft.unlink(missing_ok=True)
    return os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


class Superseded(RunError):
    """A later start has claimed this run's folder."""


_OWN = secrets.token_hex(8)
"""Random part of the names of this process's drafts: unpredictable, so that no other process can link one."""


class Unclaimed:
    """Access to a folder that has only one writer: each file is written under another name first."""

    def draft(self, path: Path) -> Path:
        """Return the file to write before publishing it as `path`; of this process alone."""
        return path.with_name(f".{path.name}.{_OWN}-{os.getpid()}.partial")

    def publish(self, path: Path) -> None:
        """Rename a draft to `path`; an existing file is replaced.

        Raises:
            Superseded: a later start has claimed the folder.
            OSError: the file system refused.
        """
        move(self.draft(path), path)

    def write(self, path: Path, text: str) -> None:
        """Write a text file whole or not at all; an existing one is replaced.

        Raises:
            Superseded: a later start has claimed the folder.
            OSError: the file system refused.
        """
        draft = self.draft(path)
        try:
            with open_new(draft) as file:
                file.write(text.encode(errors="backslashreplace"))
            self.publish(path)
        finally:
            draft.unlink(missing_ok=True)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists.

        Raises:
            Superseded: a later start has claimed the folder.
            OSError: the file system refused.
        """
        path.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that no later start has claimed the folder.

        Raises:
            Superseded: one has.
        """

    def holds(self) -> bool:
        """Whether no later start has claimed the folder."""
        try:
            self.check()
        except Superseded:
            return False
        return True

    def release(self) -> None:
        """Give the folder up, once everything is written."""


UNCLAIMED = Unclaimed()

_DRAFT = re.compile(r"\.(.+?)(?:\.[0-9a-f]{16}-\d+)?\.partial")


def drafted(name: str) -> str | None:
    """Return the name of the file that a draft of any process is written for; None if the name is not a draft's."""
    found = _DRAFT.fullmatch(name)
    return None if found is None else found[1]


@dataclass(frozen=True)
class Claim(Unclaimed):
    """One start's claim to a run folder.

    Attributes:
        folder: folder of the run.
        name: name of its staging folders.
        inside: names of folders inside that have a staging folder of their own, since they may lie on other disks.
    """

    folder: Path
    name: str
    inside: tuple[str, ...] = ()

    def draft(self, path: Path) -> Path:
        """Return the file to write before publishing it as `path`, in the run folder or in one of `inside`.

        Raises:
            Superseded: a later start has claimed the folder.
        """
        staging = path.parent / self.name
        if not _is_folder(staging):
            self.check()
            with suppress(OSError):  # the next write there reports it
                staging.mkdir(parents=True, exist_ok=True)
            self.check()  # of a later start, either this sees the folder or that sees the one just made
        return staging / path.name

    def publish(self, path: Path) -> None:
        """Move a draft to its place."""
        try:
            move(path.parent / self.name / path.name, path)
        except OSError:
            self.check()
            raise

    def remove(self, path: Path) -> None:
        """Move a file to the staging folder, and remove it there: elsewhere it could already be a later start's."""
        gone = self.draft(path)
        # There is no such file; or no staging folder, and then a later start has the run folder.
        with suppress(FileNotFoundError):
            path.replace(gone)
            gone.unlink()
        self.check()

    def check(self) -> None:
        """Check that the staging folder exists; create it again if neither this run nor another has files there."""
        if _is_folder(self.folder / self.name):
            return
        if not self._has_vanished():
            raise Superseded(f"{self.folder} belongs to a later start of this run by now, so this one ends")
        with suppress(OSError):
            (self.folder / self.name).mkdir(parents=True, exist_ok=True)

    def _has_vanished(self) -> bool:
        with suppress(OSError):
            for path in self.folder.iterdir():
                empty = path.name in self.inside and not any(path.iterdir())
                if path.name != self.name and not empty:
                    return False
        return True

    def release(self) -> None:
        """Remove the staging folders, and folders that nothing was written into."""
        for place in self.places:
            shutil.rmtree(place / self.name, ignore_errors=True)
        for name in self.inside:
            with suppress(OSError):
                (self.folder / name).rmdir()

    @property
    def places(self) -> list[Path]:
        """The folders that have a staging folder."""
        return [self.folder, *(self.folder / name for name in self.inside)]


def claim(folder: Path, inside: Iterable[str] = ()) -> Claim:
    """Claim a run folder: from now on no file of an earlier start can appear in it.

    Args:
        folder: folder of the run; created if necessary.
        inside: names of folders inside that are written into as well.

    Raises:
        Superseded: another start has claimed it at the same time, and later.
        OSError: the folder cannot be written.
    """
    wanted = tuple(inside)
    places = [folder, *(folder / name for name in wanted)]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    number = 1 + max((_number(staging) for place in places for staging in _staging_folders(place)), default=0)
    own = Claim(folder, f".start-{number:08d}-{secrets.token_hex(_NONCE_BYTES)}", wanted)
    for place in places:
        (place / own.name).mkdir(parents=True)  # the one before may have removed a folder that it left empty
    # Each of two that claim it at once makes its staging folder before it looks at the others': at least one sees both.
    for place in places:
        _clear(place, own.name)
    if any(staging.name > own.name for staging in _staging_folders(folder)) or not own.holds():
        own.release()
        raise Superseded(f"{folder} belongs to a later start of this run, so this one ends")
    return own


def is_staging(path: Path) -> bool:
    """Whether a folder is the staging folder of a start, and not part of a run's output."""
    return _STAGING.fullmatch(path.name) is not None or path.name.startswith(_TAKEN)


def _clear(place: Path, name: str) -> None:
    """Remove the staging folders of earlier starts; each is renamed first, so that nothing new can be put into it."""
    for staging in _staging_folders(place):
        if staging.name < name:
            with suppress(FileNotFoundError):  # it has been released, or taken
                staging.rename(staging.with_name(f"{_TAKEN}{secrets.token_hex(_NONCE_BYTES)}"))
    for taken in place.glob(f"{_TAKEN}*"):
        for _ in range(_TRIES):  # its owner may still be putting something there
            if taken.is_symlink():  # none of ours
                taken.unlink(missing_ok=True)
            shutil.rmtree(taken, ignore_errors=True)
            if not taken.exists():
                break


def _staging_folders(place: Path) -> list[Path]:
    return [path for path in place.glob(".start-*") if _STAGING.fullmatch(path.name)]


def _number(staging: Path) -> int:
    found = _STAGING.fullmatch(staging.name)
    assert found is not None
    return int(found[1])
