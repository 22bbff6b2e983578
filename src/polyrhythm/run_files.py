"""Files of a run folder, possibly of another person: regular files of a bounded size, opened without links.

    RUN/name               opened with O_NOFOLLOW: a symbolic link, a pipe, a device or a folder is refused
    RUN/checkpoints/name   the same; only `checkpoints` itself may be a link, to another disk
    RUN/folder/name        `folder` may not be a link

The run folder itself may be reached through links. A hard link is a regular file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from polyrhythm.errors import RequestError, printable

if TYPE_CHECKING:
    from pathlib import Path

LINKED_FOLDER = "checkpoints"
"""The only name below a run folder that may be a symbolic link."""
MOST_BYTES = 64 << 20
MOST_EVENTS_BYTES = 1 << 30
MOST_LISTING_BYTES = 1 << 30


def open_in_run(path: Path, most_bytes: int = MOST_BYTES) -> BinaryIO:
    """Open a file that lies directly in a run folder, or in a folder inside it.

    Args:
        path: path of the file. Its parent may be a link only if it is the run folder itself, or is called
            `checkpoints`.
        most_bytes: limit of the file's size; 0: none.

    Raises:
        RequestError: the file is a link, no regular file, or too large.
        OSError: the file does not exist, or cannot be read.
    """
    try:
        # Not blocking: to open a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise RequestError(
                f"{printable(str(path))} is a symbolic link: put the file itself into the run folder"
            ) from None
        if error.errno == errno.ENXIO:
            raise _irregular(path) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(path)
        if most_bytes and status.st_size > most_bytes:
            raise RequestError(
                f"{printable(str(path))} has {status.st_size:,} bytes, more than {most_bytes:,}: it is no file of a run"
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise


def _irregular(path: Path) -> RequestError:
    return RequestError(f"{printable(str(path))} is no regular file: remove it from the run folder")


def check_in_run(path: Path) -> None:
    """Check that a file of a run folder is a regular file, for libraries that open it by its path.

    Raises:
        RequestError: it is not.
        OSError: the file does not exist, or cannot be read.
    """
    open_in_run(path, most_bytes=0).close()


def exists_in_run(path: Path) -> bool:
    """Whether there is anything of this name, a dangling link included."""
    return os.path.lexists(path)


def check_folder_in_run(path: Path) -> None:
    """Check that a folder inside a run folder is not a link; one that does not exist passes.

    Raises:
        RequestError: it is a link.
    """
    if path.name != LINKED_FOLDER and path.is_symlink():
        raise RequestError(
            f"{printable(str(path))} is a symbolic link: put the folder itself into the run folder"
        )


def read_in_run(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file of a run folder.

    Raises:
        RequestError: the file is a link, no regular file, or too large.
        OSError: the file does not exist, or cannot be read.
    """
    with open_in_run(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it has grown in the meantime
        raise RequestError(
            f"{printable(str(path))} has more than {most_bytes:,} bytes: it is no file of a run"
        )
    return content


MOST_TEXT_BYTES = 1 << 20
"""Limit of a YAML file, which takes seconds to read."""


def read_text_in_run(path: Path, what: str) -> str:
    """Return the text of a YAML file of a run folder, of at most 1 MiB.

    Raises:
        RequestError: there is none, it is a link or no regular file, it is too large, or holds no text.
    """
    try:
        return read_in_run(path, MOST_TEXT_BYTES).decode()
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "it holds no text"
    raise RequestError(f"cannot read {what} {printable(str(path)):.200}: {reason}")


def parse_json(content: bytes | str, where: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RequestError: the text is not JSON, is nested too deeply, or has a number of too many digits.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "not JSON"
        raise RequestError(f"{where} is damaged ({reason}): remove it, or take it from a backup") from None


def read_json_in_run(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object of a file of a run folder.

    Raises:
        RequestError: the file is a link, no regular file, too large, or holds no JSON object.
        OSError: the file does not exist, or cannot be read.
    """
    found = parse_json(read_in_run(path, most_bytes), printable(str(path)))
    if not isinstance(found, dict):
        raise RequestError(
            f"{printable(str(path))} is damaged (no JSON object): remove it, or take it from a backup"
        )
    return found
