"""Runs the command line in processes of its own, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polyrhythm.events import Event
from polyrhythm.reporting.event_log import read_events

POLYRHYTHM = str(Path(sys.executable).with_name("polyrhythm"))
SHELL = str(Path(__file__).with_name("shell.py"))
PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.02
Found = TypeVar("Found")


@dataclass(frozen=True)
class Result:
    """What a command left behind.

    Attributes:
        status: exit status.
        out: standard output.
        err: standard error.
    """

    status: int
    out: str
    err: str

    @property
    def figures(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        assert self.status == 0, self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def complaint(self) -> str:
        """The one line of an error."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(f"{lines[0]}\n"), self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("error: ")


def shell(folder: Path, *commands: Sequence[str | Path]) -> list[Result]:
    """Runs commands one after the other in a folder."""
    text = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, SHELL],
        input=text,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * len(commands),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Result(**result) for result in json.loads(done.stdout)]


class Started:
    """A command that is running, in a session of its own as in a terminal.

    Args:
        command: program and arguments.
        folder: where it runs.
        run: its run folder.
    """

    def __init__(self, command: Sequence[str | Path], folder: Path, run: Path) -> None:
        self.run = run
        self._out, self._err = folder / f"{run.name}.out", folder / f"{run.name}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env=environment(),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def children(self) -> list[int]:
        """Its processes, in the order of their ranks."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_for(self, happened: Callable[[Event], bool]) -> Event:
        """Waits for an event of the run."""
        return wait_for(lambda: self._find(happened), f"an event of {self.run}")

    def result(self) -> Result:
        """Waits for the end."""
        status = self.process.wait(PATIENCE_S)
        return Result(status, self._out.read_text(), self._err.read_text())

    def _find(self, happened: Callable[[Event], bool]) -> Event | None:
        log = self.run / "events.jsonl"
        events = read_events(log) if log.exists() else []
        found = next((event for event in events if happened(event)), None)
        if found is None and self.process.poll() is not None:
            raise AssertionError(f"it ended: {self._err.read_text()}")
        return found


def wait_for(look: Callable[[], Found | None], what: str) -> Found:
    """Looks until there is something."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(_LOOK_EVERY_S)
    raise AssertionError(f"waited too long for {what}")


def are_gone(pids: Sequence[int]) -> bool:
    """Whether all these processes have ended; children of others stay as zombies until they are waited for."""
    return all(_state(pid) in ("", "Z") for pid in pids)


def environment() -> dict[str, str]:
    """The environment of commands: one thread a process, and nothing of a surrounding torchrun."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
