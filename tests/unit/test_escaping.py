"""Texts of others in pages, tables and scripts."""

from __future__ import annotations

import csv
import io

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.escaping import csv_cell, html, script_line, shell


def test_markup_is_text() -> None:
    assert html('<a href="x">') == "&lt;a href=&quot;x&quot;&gt;"


@pytest.mark.parametrize(
    ("given", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+3", "'-2+3"),
        ("\t=1", "'\\t=1"),
        ("-2.5", "-2.5"),
        ("cat", "cat"),
        (3, "3"),
        ("a\nb", "a\\nb"),
    ],
)
def test_a_cell_is_no_formula_and_one_line(given: object, cell: str) -> None:
    assert csv_cell(given) == cell
    written = io.StringIO()
    csv.writer(written).writerow([csv_cell(given)])
    assert next(csv.reader(io.StringIO(written.getvalue()))) == [cell]


def test_a_word_of_the_shell_is_one_word() -> None:
    assert shell("a; rm -rf $HOME") == "'a; rm -rf $HOME'"


def test_a_line_of_a_script_is_one_line() -> None:
    assert script_line("a b", "name") == "a b"
    with pytest.raises(RequestError, match=r"^name a\\nb has a line end"):
        script_line("a\nb", "name")
