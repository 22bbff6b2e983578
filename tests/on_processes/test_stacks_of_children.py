"""What tells where processes are that hang: those of a test, their forks, and those whose parents are gone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from conformance.rank_processes import RankProcesses, Seat
from on_processes.commands import Started, wait_for
from on_processes.runs import ending
from processes.family import children, kill, stop
from processes.stacks import stacks_of_children

PROGRAM = """
import os, pathlib, time

def hangs_in_a_fork(path):
    pathlib.Path(path).write_text(str(os.getpid()))
    time.sleep(1000)

if os.fork() == 0:
    hangs_in_a_fork("fork")
os._exit(0)
"""


def _hangs(seat: Seat) -> None:
    seat.tell("here")
    seat.wait_for_word()


def test_a_rank_that_hangs_and_an_orphan_tell_where_they_are(tmp_path: Path) -> None:
    with RankProcesses(_hangs, 1) as ranks, ending() as commands:
        assert ranks.hear(0) == "here"
        commands.append(Started([sys.executable, "-c", PROGRAM], tmp_path, tmp_path / "orphan"))
        assert commands[0].result().status == 0
        file = tmp_path / "fork"
        orphan = int(wait_for(lambda: file.exists() and file.read_text(), "the fork"))
        parts = ("in wait_for_word", f"process {orphan}: state S: ", "in hangs_in_a_fork")

        def told() -> bool:  # once both sleep, and have the time to answer
            found = stacks_of_children()
            return all(part in found for part in parts)

        wait_for(told, "the stacks of both")


def test_one_that_is_stopped_or_knows_nothing_of_it_lives_on(tmp_path: Path) -> None:
    with ending() as commands:
        commands.append(Started(["cat", "/dev/ptmx"], tmp_path, tmp_path / "cat"))
        (child,) = [pid for pid in children(os.getpid()) if pid == commands[0].process.pid]
        stop(child)
        found = stacks_of_children()
        assert f"process {child}: state T" in found
        assert "says nothing of its stacks" in found
        assert commands[0].process.poll() is None
        kill([child])
        assert commands[0].result().status == -signal.SIGKILL
