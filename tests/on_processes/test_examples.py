"""The examples that start processes of their own: each runs, in small, and prints what its first lines promise."""

from __future__ import annotations

import sys
from pathlib import Path

from on_processes.commands import finished
from polyrhythm.events import RunStarted
from polyrhythm.reporting.event_log import read_events

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_photographs_are_learned_and_one_is_named(tmp_path: Path) -> None:
    done = finished(
        [sys.executable, EXAMPLES / "photographs.py", "--out", str(tmp_path / "run"), "--epochs", "3"],
        tmp_path,
    )
    assert done.status == 0, done.err
    (accuracy, *answers) = [
        line for line in done.out.splitlines() if line.startswith(("test top-1", "temple"))
    ]
    assert float(accuracy.split()[2]) > 90
    assert {line.split()[1] for line in answers} == {"temple", "flower"}


def test_a_run_out_of_step_is_replayed(tmp_path: Path) -> None:
    done = finished([sys.executable, EXAMPLES / "replay_a_run.py", "--epochs", "1"], tmp_path)
    assert done.status == 0, done.err
    assert [line.split(maxsplit=3)[3] for line in done.out.splitlines() if "replayed" in line] == [
        "bit for bit"
    ] * 2


def test_torchrun_goes_on_after_a_killed_rank(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = finished(["env", f"PATH={path}", EXAMPLES / "elastic.sh", str(tmp_path / "run")], tmp_path)
    assert done.status == 0, (done.out, done.err)
    assert done.out.splitlines()[-1] == "times that the run began: 2"
    begun = [
        event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, RunStarted)
    ]
    assert [event.workers for event in begun] == [2, 2]
    assert begun[1].start_epoch > 0
