from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from polyrhythm.cli.output import (
    print_bottleneck,
    print_command,
    print_labeled,
    print_left_out,
    print_report_path,
    print_table,
)
from polyrhythm.reporting.held_back import held_back
from unit.reporting.counting.ten_steps import ten_steps


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
    print_report_path(tmp_path)
    (tmp_path / "report.html").touch()
    print_report_path(tmp_path)
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
    print_left_out({"gradients_dropped": gradients, "images_not_seen": images})
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(("columns", "most"), [("200", 100), ("72", 72)])
def test_what_is_said_fits_the_terminal_and_100_columns_and_lines_up(
    columns: str, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_labeled("time", ", ".join(["12.3 % waiting for slower workers"] * 6))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= most
    assert lines[0].startswith("time        12.3 %")
    assert all(line.startswith(" " * 12) and line[12] != " " for line in lines[1:])
    assert not [line for line in lines[1:] if line.strip().startswith("%")], "a number keeps its unit"


def test_a_path_and_a_command_in_backticks_are_never_broken(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/somewhere/" + "long/" * 30 + "report.html"
    print_labeled("report", path)
    assert path in capsys.readouterr().out
    option = "`--strategy 'local_sgd(steps=4, another=5)'`"
    for words in range(30):
        print_labeled("remedy", "word " * words + option)
        assert option in capsys.readouterr().out


def test_a_long_command_is_printed_in_lines_that_a_shell_reads_as_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["polyrhythm", "train", "--strategy", "local_sgd(steps=4)", *["--data", "a folder"] * 9]
    print_command("run it", shlex.join(words))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert len(printed.splitlines()) > 1
    assert shlex.split(printed.removeprefix("run it").replace("\\\n", " ")) == words


def test_the_bottleneck_is_a_problem_with_a_remedy_and_its_gain(capsys: pytest.CaptureFixture[str]) -> None:
    found = held_back(ten_steps([(5, 5), (5, 5), (5, 5), (8, 2)], servers=0))
    assert found is not None
    print_bottleneck({"held_back": asdict(found), "stragglers": {3: 1.6}})
    lines = " ".join(capsys.readouterr().out.split())
    assert lines == (
        "bottleneck worker 3 is 1.6× slower than the median, and the others wait for it "
        "remedy `--balance measured`, which gives it a smaller share: up to +21 % images/s "
        "time 57.5 % computing, 22.5 % waiting for slower workers, 20.0 % communication"
    )


def test_computing_is_no_bottleneck_and_needs_no_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    found = held_back(ten_steps([(9.5, 0.5), (9.5, 0.5)], servers=0))
    assert found is not None
    print_bottleneck({"held_back": asdict(found), "stragglers": {}})
    printed = capsys.readouterr().out
    assert printed.startswith("bottleneck  none: ")
    assert "remedy" not in printed


def test_of_many_stragglers_three_are_named_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = {str(worker): 2.0 + worker / 10 for worker in range(9)}
    print_bottleneck({"held_back": None, "stragglers": slow})
    *named, rest = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0].split()[-1] for line in named] == ["8", "7", "6"]
    assert rest.strip() == "6 more, 2.0× to 2.5× slower"
