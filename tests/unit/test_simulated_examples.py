"""The examples that need no processes: each runs, in small, and prints what its first lines promise."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> list[str]:
    """Runs one as a script would be; returns the lines that it prints."""
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_parts_by_speed_and_an_own_pace_are_faster_on_uneven_machines(capsys, monkeypatch) -> None:
    lines = printed("uneven_machines.py", capsys, monkeypatch, "--epochs", "2")
    seconds = [float(re.search(r"(\d+\.\d) s ", line)[1]) for line in lines]
    assert len(seconds) == 3
    assert max(seconds[1:]) < 0.6 * seconds[0]


def test_compression_is_faster_on_a_slow_link(capsys, monkeypatch) -> None:
    lines = printed("slow_link.py", capsys, monkeypatch, "--epochs", "1")
    seconds = {line[:20].strip(): float(re.search(r"(\d+\.\d) s ", line)[1]) for line in lines}
    assert len(seconds) == 5
    plain = seconds.pop("as it is")
    assert max(seconds.values()) < plain


def test_the_first_to_the_target_is_the_one_whose_command_is_printed(capsys, monkeypatch, tmp_path) -> None:
    options = ["--epochs", "2", "--until", "top1=0.3", "--out", str(tmp_path / "runs")]
    lines = printed("pick_a_strategy.py", capsys, monkeypatch, *options)
    (fastest,) = [line for line in lines if line.startswith("Fastest to top-1 30.0 %: ")]
    best = re.search(r"--strategy '(.+)'$", lines[-1])[1]
    assert fastest.removeprefix("Fastest to top-1 30.0 %: ").startswith(best)


def test_an_own_strategy_runs_beside_another(capsys, monkeypatch) -> None:
    other, every = printed("own_strategy.py", capsys, monkeypatch)
    assert other.startswith("every other step")
    assert every.startswith("every step")
    assert float(re.search(r"top-1 (\d+\.\d)", other)[1]) > 75


def test_what_slurm_would_be_given_is_printed() -> None:
    done = subprocess.run(
        [str(EXAMPLES / "slurm.sh"), "--dry-run"],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=1-4" in done.stdout
    assert "scontrol requeue" in done.stdout
