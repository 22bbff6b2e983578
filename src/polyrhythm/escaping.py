"""Texts and numbers of others in HTML, JSON, tables, shells and scripts: one function for each target.

YAML is written by PyYAML alone.
"""

from __future__ import annotations

import html as _html
import json
import shlex

from polyrhythm.errors import RequestError, printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def html(value: object) -> str:
    """Escape a value for HTML text and quoted attributes."""
    return _html.escape(str(value), quote=True)


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON, in one line without `indent`.

    Raises:
        RequestError: a number is none of JSON, as sums and ratios of the numbers of a damaged record can be.
    """
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(
            value, ensure_ascii=indent is not None, allow_nan=False, indent=indent, separators=separators
        )
    except ValueError:
        raise RequestError(
            "a figure is beyond the range of numbers, so the record of a run is damaged: leave that run out"
        ) from None


def csv_cell(value: object) -> str:
    """Return a value as a cell of a table; a spreadsheet would carry out a text that begins like a formula.

    Numbers stay as they are; before other texts that begin with = + - @, a tab or a line end goes an apostrophe.
    """
    written = str(value)
    if isinstance(value, int | float):
        return written
    text = printable(written)
    if not text.startswith(_FORMULA) and not written.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def shell(value: object) -> str:
    """Return a value as one word of a shell's command line."""
    return shlex.quote(str(value))


def script_line(value: object, what: str) -> str:
    """Return a value that becomes a part of a line of a script, such as of a directive of a batch system.

    Raises:
        RequestError: the value has a control character, such as a line end, which would begin another line.
    """
    text = str(value)
    if printable(text) != text:
        raise RequestError(
            f"{what} {printable(text)!s:.100} has a line end or another control character: leave it out"
        )
    return text
