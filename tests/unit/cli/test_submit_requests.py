"""`polyrhythm submit` as it is typed: what engines would get, and what is refused in one line before they get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.cli.main import main

TRAIN = ["--", "train", "--data", "digits", "--model", "mlp", "--workers", "2"]


@pytest.mark.parametrize("engine", ["slurm(nodes=2)", "ray", "kubernetes"])
def test_what_an_engine_would_get_is_printed(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["submit", "--engine", engine, "--dry-run", *TRAIN])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert "train" in out
    assert "--data digits" in out or "- --data\n" in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([*TRAIN], "name the engine with --engine: slurm, ray, kubernetes or ssh"),
        (["--engine", "slurm"], "name the command behind --"),
        (["--engine", "slrum", *TRAIN], "unknown engine 'slrum': did you mean slurm"),
        (["--engine", "slurm(queue=x)", *TRAIN], "unknown key of engine slurm 'queue'"),
        (["--engine", "slurm", "--", "trian"], "unknown verb 'trian': did you mean train"),
        (["--engine", "slurm", *TRAIN, "--epoch", "3"], "--epoch"),
        (["--engine", "slurm", *TRAIN, "--epochs", "many"], "many"),
        (["--engine", "slurm", *TRAIN, "--strategy", "sync"], "unknown strategy 'sync'"),
        (["--engine", "slurm", *TRAIN], "sbatch is not on this host: submit from a host of the Slurm cluster"),
        (["--engine", "kubernetes", *TRAIN], "kubectl is not on this host: install it"),
        (["--engine", "ray(address='127.0.0.1:1')", *TRAIN], "no Ray cluster answers at 127.0.0.1:1 (Connection ref"),
        (["--engine", "ssh", *TRAIN], "hosts"),
        (["--engine", "ssh(hosts='nowhere.txt')", *TRAIN], "nowhere.txt"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(
    refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], complaint: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert complaint in refused("submit", *words)
