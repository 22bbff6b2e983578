"""The log of a run: `events.jsonl`, one event a line.

JSON knows no infinities and no not-a-number. They are written as the texts "NaN", "Infinity" and "-Infinity",
as the JSON mapping of Protocol Buffers does, so that every line is valid JSON and reads back as it was.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import RequestError
from polyrhythm.events import from_json

if TYPE_CHECKING:
    from pathlib import Path

    from polyrhythm.events import Event

LOG_FILE = "events.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class EventLog:
    """Appends every event to a file as it happens, so that a killed run has all but its last line.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        _cut_to_whole_lines(path)
        # Line-buffered: a line is with the operating system before on_event returns.
        self._file = path.open("a", encoding="utf-8", buffering=1, newline="\n")

    def on_event(self, event: Event) -> None:
        """Writes one line."""
        self._file.write(json.dumps(_encoded(event.to_json()), ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _cut_to_whole_lines(path: Path) -> None:
    # A killed run may leave half a line; a resumed one would write its first event into the middle of it.
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def read_events(path: Path) -> list[Event]:
    """Reads a log. A last line that was cut short by a killed run is left out.

    Raises:
        RequestError: there is no such file, or a line of it is damaged; the line is named.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give the folder of a run") from None
    # Whatever follows the last line end was never finished.
    return [_event(line, path, number) for number, line in enumerate(lines[:-1], start=1)]


def _event(line: bytes, path: Path, number: int) -> Event:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not an object")
        return from_json({key: _decoded(value) if key != "text" else value for key, value in record.items()})
    except (ValueError, AttributeError) as error:
        raise RequestError(
            f"{path}: line {number} is damaged ({error}); delete that line to read the others"
        ) from None


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
