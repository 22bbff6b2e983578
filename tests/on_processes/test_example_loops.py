"""The loops of `examples/` that stand for well-known scripts: few lines differ from the one alone, and both learn."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from on_processes.commands import finished
from on_processes.verb import POLYRHYTHM

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = ("reference_loop", "recipe_loop", "speed_loop")


@pytest.mark.parametrize("loop", LOOPS)
def test_at_most_eight_lines_differ(loop: str) -> None:
    alone, several = [
        (EXAMPLES / loop / f"{name}.py").read_text().splitlines() for name in ("alone", "several")
    ]
    changed = [line for line in difflib.ndiff(alone, several) if line.startswith("+ ") and line.strip("+ ")]
    assert 0 < len(changed) <= 8, changed


def printed(loop: str, *options: str) -> list[float]:
    """Runs one on two workers; gives the accuracies that its only worker that leads has printed."""
    command = [POLYRHYTHM, "run", "--workers", "2", "--threads", "1", str(EXAMPLES / loop / "several.py")]
    done = finished([*command, *options], EXAMPLES)
    assert done.status == 0, done.err
    return [float(found) for found in re.findall(r"accuracy (\d+\.\d+)", done.out)]


@pytest.mark.parametrize(
    ("loop", "options", "least"),
    [
        ("reference_loop", ["--batch-size", "32", "--epochs", "3", "--strategy", "parameter_server"], 0.8),
        ("speed_loop", ["--batch-size", "25", "--epochs", "3", "--strategy", "local_sgd(steps=2)"], 0.7),
    ],
)
def test_they_learn_on_several_workers(loop: str, options: list[str], least: float, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    found = printed(loop, *options, "--out", str(out))
    assert len(found) == 3
    assert found[-1] > least
    assert out.is_file()
