"""Tutorials of the site: their commands are run, timed and shown, and one that fails or hangs is named in a line."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from processes.family import are_gone

pytest.importorskip("nbformat")
ROOT = Path(__file__).parents[2]
PAGE = """# A page

Six words before the first.

```console run
$ echo one
$ echo two
shown before
```

Between.

```console run
$ echo three
```
"""


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts" / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["build_site"] = importlib.util.module_from_spec(
        spec
    )  # which its dataclasses look up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tutorials(site: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "docs" / "tutorials"
    folder.mkdir(parents=True)
    (folder / "page.md").write_text(PAGE)
    monkeypatch.setattr(site, "SOURCE", tmp_path)
    return folder


def cells(folder: Path) -> list[Any]:
    return json.loads((folder / "page.ipynb").read_text())["cells"]


def test_what_commands_print_stands_below_them_and_in_the_notebook(site: ModuleType, tutorials: Path) -> None:
    site.write_tutorials(dry=False)
    shown = (tutorials / "page.md").read_text()
    assert "```console\n$ echo one\none\n$ echo two\ntwo\n```\n" in shown
    assert "```console\n$ echo three\nthree\n```\n" in shown
    reading_s = 2  # of 8 words; the command itself may take longer
    found = re.search(r"the first result is there (\d+) s after the first word", shown)
    assert found is not None
    assert int(found[1]) >= reading_s
    codes = [cell for cell in cells(tutorials) if cell["cell_type"] == "code"][1:]
    assert ["".join(cell["source"]) for cell in codes] == ["!echo one\n!echo two", "!echo three"]
    assert ["".join(cell["outputs"][0]["text"]) for cell in codes] == ["one\ntwo\n", "three\n"]


def test_commands_are_shown_and_not_run_in_a_dry_build(site: ModuleType, tutorials: Path) -> None:
    site.write_tutorials(dry=True)
    assert "```console\n$ echo one\n$ echo two\nshown before\n```\n" in (tutorials / "page.md").read_text()
    assert not any(cell.get("outputs") for cell in cells(tutorials))


def test_a_command_that_does_not_end_is_named_in_one_line_and_nothing_of_it_is_left(
    site: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(site, "PATIENCE_S", 0.3)
    began_s = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        site.run("$ sleep 1000 & echo $! > child; wait", tmp_path, "page.md")
    assert time.monotonic() - began_s < 60
    assert str(ended.value).startswith("page.md: `sleep 1000 & echo $! > child; wait` took more than 0 s: ")
    assert "\n" not in str(ended.value)
    child = [int((tmp_path / "child").read_text())]
    while (
        not are_gone(child) and time.monotonic() - began_s < 60
    ):  # a signal is sent, and comes a little later
        time.sleep(0.01)
    assert are_gone(child)


def test_a_command_that_fails_is_named_with_what_it_said(site: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        site.run("$ echo no such thing; exit 3", tmp_path, "page.md")
    assert str(ended.value) == "page.md: `echo no such thing; exit 3` ended with status 3:\nno such thing\n"


def test_a_first_result_that_comes_too_late_is_refused(
    site: ModuleType, monkeypatch: pytest.MonkeyPatch, tutorials: Path
) -> None:
    monkeypatch.setattr(site, "FIRST_RESULT_S", 2.0)
    with pytest.raises(SystemExit, match=r"page\.md: a first result after \d+ s is too late"):
        site.write_tutorials(dry=False)


def test_what_a_page_prints_at_length_is_shortened_in_the_middle(site: ModuleType, tmp_path: Path) -> None:
    lines = site.run("$ seq 200", tmp_path, "page.md").printed.splitlines()
    assert (lines[0], lines[30], lines[-1]) == ("1", "…", "200")
    assert len(lines) == 61


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (["epoch 1  loss 0.5", "done after 2 s"], None),
        (["…", "done after 931 ms"], None),
        (["epoch 1 loss 0.5", "…"], None),
        ([], None),
        (["epoch 1 loss 0.5"], "the end"),
        (["done after 2 s"], "done after 2 s"),
        (["…", "saved", "…"], "saved"),
        (["…", "epoch 2  loss 0.3", "done after 2 s"], None),
    ],
)
def test_shown_lines_are_compared_with_what_was_printed(
    site: ModuleType, shown: list[str], missing: str | None
) -> None:
    assert site.first_missing(shown, "epoch 3  loss 0.25\ndone after 1.5 s") == missing
