"""Which start of a run owns its folder: of several, only the latest writes into it.

Every start makes its files in a staging folder of its own and moves them to where they belong. A later start first
takes the staging folders of all earlier ones away:

    start 1   .start-00000001-9f…/step-…  ── rename ─▶ checkpoints/step-…
    start 2      takes it away ─┐   .start-00000002-41…/
    start 1                     ✗ ── rename: there is no such file; nothing of start 1 arrives any more

So the file system itself decides between a late writer and its successor, whole or not at all, and nothing can be left
behind that would block a later start: the staging folder of a killed process is taken away like any other.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.errors import RunError

_STAGING = re.compile(r"\.start-(\d{8})-[0-9a-f]{8}")
_TAKEN = ".taken-"
_NONCE_BYTES = 4
_TRIES = 100


class Superseded(RunError):
    """A later start has this run's folder."""


class Unclaimed:
    """How files come into a folder that nobody else writes into: each is made beside, under another name."""

    def draft(self, path: Path) -> Path:
        """Names the file that is to be published as `path`."""
        return path.with_name(f".{path.name}.partial")

    def publish(self, path: Path) -> None:
        """Gives a draft its name; a file of that name is replaced.

        Raises:
            Superseded: a later start has the folder.
            OSError: the system could not do so.
        """
        self.draft(path).replace(path)

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there.

        Raises:
            Superseded: a later start has the folder.
            OSError: the system could not do so.
        """
        path.unlink(missing_ok=True)

    def check(self) -> None:
        """Checks that no later start has the folder.

        Raises:
            Superseded: one has.
        """

    def holds(self) -> bool:
        """Whether no later start has the folder."""
        try:
            self.check()
        except Superseded:
            return False
        return True

    def release(self) -> None:
        """Gives the folder up, once everything is written."""


UNCLAIMED = Unclaimed()


@dataclass(frozen=True)
class Claim(Unclaimed):
    """One start's claim to a run folder.

    Attributes:
        folder: of the run.
        name: of its staging folders.
        inside: names of folders in there with a staging folder of their own, since they may lie on other disks.
    """

    folder: Path
    name: str
    inside: tuple[str, ...] = ()

    def draft(self, path: Path) -> Path:
        """Names the file that is to be published as `path`, which lies in the run folder or in one of `inside`."""
        return path.parent / self.name / path.name

    def publish(self, path: Path) -> None:
        """Moves a draft to where it belongs."""
        self._move(self.draft(path), path)

    def remove(self, path: Path) -> None:
        """Moves a file to the staging folder, and removes it there: from anywhere else it could be a later start's."""
        gone = self.draft(path)
        # There is no such file; or no staging folder, and then a later start has the run folder.
        with suppress(FileNotFoundError):
            path.replace(gone)
            gone.unlink()
        self.check()

    def check(self) -> None:
        """Checks that the staging folder is there."""
        if not (self.folder / self.name).is_dir():
            raise Superseded(
                f"{self.folder} is another's by now: a later start of this run has taken it over, and this one ends"
            )

    def release(self) -> None:
        """Removes the staging folders, and folders that nothing was written into."""
        for place in self.places:
            shutil.rmtree(place / self.name, ignore_errors=True)
        for name in self.inside:
            with suppress(OSError):
                (self.folder / name).rmdir()

    @property
    def places(self) -> list[Path]:
        """The folders that have a staging folder."""
        return [self.folder, *(self.folder / name for name in self.inside)]

    def _move(self, source: Path, target: Path) -> None:
        try:
            source.replace(target)
        except OSError:
            self.check()
            raise


def claim(folder: Path, inside: Iterable[str] = ()) -> Claim:
    """Claims a run folder: from now on nothing of an earlier start comes into it.

    Args:
        folder: of the run; made if it is not there.
        inside: names of folders in there that are written into as well.

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
        raise Superseded(f"{folder} is another's: a later start of this run has it, and this one ends")
    return own


def is_staging(path: Path) -> bool:
    """Whether a folder is the staging folder of a start, and no part of what a run leaves."""
    return _STAGING.fullmatch(path.name) is not None or path.name.startswith(_TAKEN)


def _clear(place: Path, name: str) -> None:
    """Removes the staging folders of earlier starts; each is first renamed, so that nothing new is put into it."""
    for staging in _staging_folders(place):
        if staging.name < name:
            with suppress(FileNotFoundError):  # it has been given up, or taken
                staging.rename(staging.with_name(f"{_TAKEN}{secrets.token_hex(_NONCE_BYTES)}"))
    for taken in place.glob(f"{_TAKEN}*"):
        for _ in range(_TRIES):  # its owner may still be putting something there
            shutil.rmtree(taken, ignore_errors=True)
            if not taken.exists():
                break


def _staging_folders(place: Path) -> list[Path]:
    return [path for path in place.glob(".start-*") if _STAGING.fullmatch(path.name)]


def _number(staging: Path) -> int:
    found = _STAGING.fullmatch(staging.name)
    assert found is not None
    return int(found[1])
