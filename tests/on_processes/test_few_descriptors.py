"""Runs where few files may be open: the limit is raised as far as it may be, or the run is refused in one line."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from conformance.clean_process import CONTEXT
from polyrhythm.cli.main import main

TRAIN = ["train", "--data", "digits", "--model", "mlp(hidden=[4])", "--epochs", "1", "--out", "run"]


def limited(soft: int, hard: int, arguments: list[str], folder: str) -> None:
    os.chdir(folder)
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    main(arguments)


def run(soft: int, hard: int, arguments: list[str], folder: Path) -> tuple[int | None, list[str]]:
    process = CONTEXT.Process(target=limited, args=(soft, hard, arguments, str(folder)))
    process.start()
    process.join(60)
    return process.exitcode, (folder / "said").read_text().splitlines()


def test_a_soft_limit_is_raised(tmp_path: Path) -> None:
    status, said = run(32, 4096, [*TRAIN, "--workers", "4", "--batch-size", "128"], tmp_path)
    assert status == 0, said
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_limit_that_does_not_suffice_is_refused(verb: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise AssertionError('no rank is started')")
    words = TRAIN if verb == "train" else ["run"]
    script = [] if verb == "train" else ["script.py"]
    status, said = run(64, 64, [*words, "--workers", "8", *script], tmp_path)
    assert status == 2
    assert said == [
        "error: 8 ranks need about 96 open files a process, and this host allows 64: raise its limit (`ulimit -Hn`), "
        "or ask for fewer workers and servers"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said", "script.py"]
