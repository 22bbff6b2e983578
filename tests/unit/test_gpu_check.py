"""The checks of a GPU: how calls follow each other, and that a fault in each part is found; all without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
ORDER = [1, 2, 3, 6, 5, 4, 7]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(GPU))
    before = set(sys.modules)
    yield importlib.import_module("check")
    for name in set(sys.modules) - before:
        if name == "check" or name.partition(".")[0] == "checks":
            del sys.modules[name]


@pytest.fixture
def part(check: ModuleType) -> Any:
    """Gives a part's module by name."""
    return lambda name: importlib.import_module(f"checks.{name}")


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return {line["row"]: line for line in lines if "outcome" in line}


def call(check: ModuleType, out: Path, *words: str) -> int:
    return int(check.main(["--device", "cpu", "--quick", "--out", str(out), *words]))


# How calls follow each other


def planned(check: ModuleType, monkeypatch: pytest.MonkeyPatch, **rows: Any) -> None:
    """Have the script make these rows alone."""
    setting = importlib.import_module("checks.setting")
    made = tuple(setting.Row(name, act, 1.0) for name, act in rows.items())
    monkeypatch.setattr(check, "parts", lambda: [setting.Part(1, "planned", made)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_first_row_says_so(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--out", str(tmp_path)]) == 2
    (line,) = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["call"] == 1
    assert line["machine"]["torch"] == torch.__version__
    assert line["machine"]["impossible"]
    assert capsys.readouterr().err == f"nothing can be checked: {line['machine']['impossible']}\n"


def test_missing_packages_are_named(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "DEPENDENCIES", ("torch", "no_such_package", "nor_this_one"))
    assert call(check, tmp_path) == 2
    assert "packages are missing: no_such_package, nor_this_one" in capsys.readouterr().err


def test_a_row_that_fails_stops_no_other(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = importlib.import_module("checks.setting")

    def breaks(_: Any) -> dict[str, Any]:
        raise ZeroDivisionError("of all things")

    def dies(_: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def raises(error: Exception, _: Any) -> dict[str, Any]:
        raise error

    planned(
        check,
        monkeypatch,
        breaks=breaks,
        dies=dies,
        wrong=partial(raises, setting.Failed("too slow", {"share": 0.5})),
        absent=partial(raises, setting.NotInstalled("kornia")),
        elsewhere=partial(raises, setting.Skipped("one GPU", {"speed": 2.0})),
        good=lambda _: {"figure": 1.5},
    )
    assert call(check, tmp_path) == 1
    rows = rows_of(tmp_path)
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {
        "breaks": "FAILED",
        "dies": "FAILED",
        "wrong": "FAILED",
        "absent": "not installed",
        "elsewhere": "left out",
        "good": "ok",
    }
    assert rows["breaks"]["trace"][-1] == "ZeroDivisionError: of all things"
    assert "died with status -9" in rows["dies"]["why"]
    assert (rows["wrong"]["why"], rows["wrong"]["found"]) == ("too slow", {"share": 0.5})
    assert rows["elsewhere"]["found"] == {"speed": 2.0}
    assert rows["good"]["found"] == {"figure": 1.5}


def test_a_further_call_makes_what_is_left_and_nothing_twice(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"

    def note(name: str, _: Any) -> dict[str, Any]:
        with made.open("a") as file:
            file.write(f"{name} ")
        return {}

    planned(check, monkeypatch, one=partial(note, "one"))
    assert call(check, tmp_path) == 0
    planned(check, monkeypatch, one=partial(note, "one"), two=partial(note, "two"))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"row": "two", "outcome": "o')  # a call was killed while it wrote
    assert call(check, tmp_path) == 0
    assert made.read_text() == "one two "
    assert rows_of_whole_lines(tmp_path)["two"] == "ok"


def rows_of_whole_lines(out: Path) -> dict[str, str]:
    found = {}
    for line in (out / "results.jsonl").read_text().splitlines():
        if line.endswith("}"):
            row = json.loads(line)
            if "outcome" in row:
                found[row["row"]] = row["outcome"]
    return found


def test_a_row_at_the_end_of_a_call_is_made_by_the_next_and_given_up_after_two(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(_: Any) -> dict[str, Any]:
        time.sleep(600)
        raise AssertionError

    monkeypatch.setattr(check, "machine", lambda device: {})
    planned(check, monkeypatch, hangs=hangs, good=lambda _: {})
    for _ in range(2):
        assert call(check, tmp_path, "--seconds", "3") == 3
        assert not rows_of(tmp_path)
    assert call(check, tmp_path, "--seconds", "60") == 1
    rows = rows_of(tmp_path)
    assert rows["hangs"]["why"] == "it was cut off in 2 calls"
    assert rows["good"]["outcome"] == "ok"


def test_failed_rows_are_made_again_when_asked(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> dict[str, Any]:
        raise ValueError

    planned(check, monkeypatch, mended=fails)
    assert call(check, tmp_path) == 1
    planned(check, monkeypatch, mended=lambda _: {})
    assert call(check, tmp_path) == 1
    assert call(check, tmp_path, "--again") == 0


def test_rows_of_another_device_are_not_taken_for_these(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(check, monkeypatch, good=lambda _: {})
    assert call(check, tmp_path) == 0
    assert check.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("name another folder with --out\n")
    assert call(check, tmp_path) == 0


def test_the_order_of_the_parts_and_three_calls(check: ModuleType) -> None:
    parts = check.parts()
    assert [part.number for part in parts] == ORDER
    rows = [row for part in parts for row in part.rows]
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.check.__doc__ or row.check.func.__doc__ for row in rows)
    start_s = 15.0  # of a call, with a look at the machine
    calls, left_s = 1, check.CALL_S - start_s
    for row in rows:
        if row.seconds > left_s:
            calls, left_s = calls + 1, check.CALL_S - start_s
        left_s -= row.seconds
    assert calls <= 3


def test_a_part_that_cannot_be_imported_is_a_row(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MODULES", ("no_such_part", "energy"))
    parts = check.parts()
    with pytest.raises(ModuleNotFoundError):
        parts[0].rows[0].check(None)
    assert parts[1].number == 7


@pytest.mark.timeout(600)  # it starts some 20 runs
def test_each_part_on_the_cpu(check: ModuleType, tmp_path: Path) -> None:
    sample = {
        1: ["pinned copies", "overlap with the backward pass"],
        2: ["resnet50: torch alone", "resnet50: train", "lenet5: torch alone", "lenet5: join"],
        3: ["a GPU rank alone", "two ranks on one GPU: synchronous"],
        6: ["predicted: one worker"],
        5: ["augmentation: crop and flip"],
        4: ["compressed by top_k"],
    }
    names = [name for rows in sample.values() for name in rows]
    words = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--seconds", "550", "--only", *names]
    subprocess.run([sys.executable, check.__file__, *words, "Kornia", "energy of an image"], check=True)
    rows = rows_of(tmp_path)
    assert {name: row["outcome"] for name, row in rows.items() if name in names} == dict.fromkeys(names, "ok")
    assert {row["part"] for row in rows.values()} == set(ORDER)
    assert rows["Kornia"]["outcome"] in ("ok", "not installed")
    assert rows["energy of an image"]["outcome"] == ("ok" if torch.cuda.is_available() else "left out")


def test_processes_below_a_process_are_found(part: Any) -> None:
    code = "import subprocess, sys; run = subprocess.Popen(['sleep', '60']); print(run.pid, flush=True); run.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        below = int(parent.stdout.readline())
        try:
            assert part("setting").descendants(parent.pid) == [below]
            assert {parent.pid, below} <= set(part("setting").descendants(os.getpid()))
        finally:
            os.kill(below, signal.SIGKILL)


def test_the_rate_of_a_run_is_that_of_its_window(part: Any, tmp_path: Path) -> None:
    setting = part("setting")
    reports = setting.Reports(setting.Window(False, from_epoch=1, skip_s=1.0))
    path = tmp_path / "events.jsonl"
    told = [
        (0, 0, 1.0, 99),
        (0, 1, 2.0, 99),
        (0, 1, 3.0, 50),
        (0, 2, 9.0, 70),
        (0, 2, 10.0, 50),
        (1, 1, 2.0, 1),
    ]
    told += [(1, 1, 4.0, 40), (1, 2, 5.0, 20)]
    lines = [
        json.dumps(
            {"event": "WorkerProgress", "worker": worker, "epoch": epoch, "time_s": at_s, "images": images}
        )
        for worker, epoch, at_s, images in told
    ]
    path.write_text("\n".join([*lines, '{"event": "Worker']))
    reports.read(path)
    reports.read(path)
    # Worker 0: 100 images in two seconds within epochs 1 and 2; worker 1: 40 in two seconds. Between epochs: none.
    assert reports.rate == 50 + 20
    assert reports.seconds == 2.0


# A fault in each part


def quick(part: Any, tmp_path: Path) -> Any:
    return part("setting").Setting("cpu", tmp_path, quick=True)
