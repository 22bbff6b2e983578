"""The observers of a run's events, and the first of them: the log, `events.jsonl`, one event a line.

JSON has no infinities and no not-a-number. They are written as the texts "NaN", "Infinity" and "-Infinity",
as the JSON mapping of Protocol Buffers does, so that every line is valid JSON and reads back as it was.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.errors import RequestError, printable
from polyrhythm.events import Notice, from_json
from polyrhythm.run_files import MOST_EVENTS_BYTES, read_in_run

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

    from polyrhythm.events import Event


class Observer(Protocol):
    """A consumer of a run's events, called with each of them in order, by one thread."""

    def on_event(self, event: Event) -> None:
        """Handle one event; must return soon, since the run waits for it."""

    def close(self) -> None:
        """Write pending events, and release files and the terminal; a second call does nothing."""


LOG_FILE = "events.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class EventLog:
    """Appends every event to a file as it happens, so that a killed run has all but its last line.

    On a full disk events are dropped until there is room again, and a notice gives their number. A resumed run
    continues in a copy, so that a process left over from an earlier start writes into the file that was replaced.

    Raises:
        Superseded: the folder is another's.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, claim: Unclaimed = UNCLAIMED) -> None:
        self._path, self._claim = path, claim
        self._left_out = 0
        self._file = self._begun_with(_whole_lines(path))

    def _begun_with(self, content: bytes) -> FileIO:
        draft = self._claim.draft(self._path)
        draft.unlink(missing_ok=True)
        # Unbuffered: a line is with the operating system before on_event returns.
        file = draft.open("x+b", buffering=0)
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._claim.publish(self._path)
        except OSError:
            file.close()
            draft.unlink(missing_ok=True)
            raise
        return file

    @property
    def in_place(self) -> bool:
        """Whether the file is where it was made, and not deleted or moved with its folder."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def write_again(self) -> None:
        """Write the log so far to where it was made, from the file that is still open.

        Raises:
            OSError: it cannot be written there, or the old file cannot be read.
        """
        self._file.seek(0)
        before, self._file = self._file, self._begun_with(self._file.readall())
        before.close()

    def on_event(self, event: Event) -> None:
        """Write one line."""
        events = [event]
        if self._left_out:
            text = f"{self._left_out} events are missing here, for which there was no room on the disk"
            events = [Notice(time_s=event.time_s, text=text), event]
        self._left_out = 0 if self._wrote(events) else self._left_out + 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._left_out:
            print(
                f"polyrhythm: {self._left_out} events are missing at the end of {self._path}",
                file=sys.stderr,
                flush=True,
            )
        self._left_out = 0

    def _wrote(self, events: list[Event]) -> bool:
        """Write a line each, or nothing; return whether they were written."""
        records = [_encoded(event.to_json()) for event in events]
        # A file's name may hold bytes that are no UTF-8; JSON has them as \udcXX.
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
        content, end = "".join(lines).encode(errors="backslashreplace"), None
        try:
            end = self._file.seek(0, os.SEEK_END)
            if self._file.write(content) == len(content):
                return True
            reason = os.strerror(errno.ENOSPC)
        except OSError as error:  # on a network file system also: there is no such file any more
            reason = error.strerror or str(error)
        if end is not None:
            with suppress(OSError):
                self._file.truncate(end)
        if not self._left_out:
            print(
                f"polyrhythm: cannot write {self._path}: {reason}; events are dropped until it can be written",
                file=sys.stderr,
                flush=True,
            )
        return False


def _whole_lines(path: Path) -> bytes:
    # A killed run may leave half a line; a resumed one would write its first event into the middle of it.
    try:
        content = read_in_run(path, MOST_EVENTS_BYTES)
    except FileNotFoundError:
        return b""
    return content[: content.rfind(b"\n") + 1]


def read_events(path: Path) -> list[Event]:
    """Read a log. An incomplete last line of a killed run is dropped.

    Raises:
        RequestError: there is no such file, or a line of it is damaged; the line is named.
    """
    try:
        lines = read_in_run(path, MOST_EVENTS_BYTES).split(b"\n")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give the folder of a run") from None
    del lines[-1]  # whatever follows the last line end was never finished
    events: list[Event] = []
    for start in range(0, len(lines), _LINES_AT_A_TIME):
        some = lines[start : start + _LINES_AT_A_TIME]
        found = _at_once(some)
        if found is None:
            found = [_event(line, path, number) for number, line in enumerate(some, start=start + 1)]
        events += found
    return events


_LINES_AT_A_TIME = 1000
_QUOTED_NOT_FINITE = tuple(f'"{name}"'.encode() for name in _NOT_FINITE)


def _at_once(lines: list[bytes]) -> list[Event] | None:
    """Return the events of many lines, parsed as one array; None where they must be looked at one by one."""
    if not all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        return None
    content = b",".join(lines)
    decode = any(name in content for name in _QUOTED_NOT_FINITE)
    try:
        records = json.loads(b"[" + content + b"]")
        if len(records) != len(lines) or not all(isinstance(record, dict) for record in records):
            return None
        return [from_json(_values(record) if decode else record) for record in records]
    except (ValueError, AttributeError, RecursionError):
        return None


def _event(line: bytes, path: Path, number: int) -> Event:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not an object")
        return from_json(_values(record))
    except (ValueError, AttributeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
        raise RequestError(
            f"{path}: line {number} is damaged ({reason}); delete that line to read the others"
        ) from None


def _values(record: dict[str, Any]) -> dict[str, Any]:
    return {key: _decoded(value) if key != "text" else value for key, value in record.items()}


def _encoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _encoded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
