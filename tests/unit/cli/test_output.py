from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.cli.output import print_table, say_what_was_left_out, say_where_the_report_is


def test_a_title_wider_than_its_table_stays_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "holiday/[2024] a beach with a long name.jpg"
    print_table(name, ["", "class"], [["1", "sea"], ["2", "sand"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [name, "   class", "1  sea", "2  sand"]


def test_no_report_is_promised_that_was_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say_where_the_report_is(tmp_path)
    (tmp_path / "report.html").touch()
    say_where_the_report_is(tmp_path)
    assert capsys.readouterr().out == f"report      {tmp_path}/report.html\n"


def test_names_are_not_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ["class"], [["cat [bold] :cat:"]])
    assert "cat [bold] :cat:" in capsys.readouterr().out


def test_a_table_without_a_title_begins_with_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ["class"], [["sea"]])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["class", "sea"]


@pytest.mark.parametrize(
    ("gradients", "images", "line"),
    [
        (0, 0, ""),
        (13, 1077, "left out    13 gradients too late to count, 1,077 images of the epochs not seen\n"),
        (1, 0, "left out    1 gradient too late to count\n"),
        (0, 1, "left out    1 image of the epochs not seen\n"),
    ],
)
def test_what_did_not_count_is_said(
    gradients: int, images: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_what_was_left_out({"gradients_dropped": gradients, "images_not_seen": images})
    assert capsys.readouterr().out == line
