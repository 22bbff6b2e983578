"""Runs the command line in processes of its own, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from on_processes.brake import Brake
from on_processes.verb import POLYRHYTHM, Verb
from polyrhythm.events import Event
from polyrhythm.reporting.event_log import read_events
from processes.family import are_gone, children, descendants, kill, members
from processes.stacks import stacks_of_children

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


class Started:
    """A command that is running, in a session of its own as in a terminal.

    Args:
        command: program and arguments.
        folder: where it runs.
        run: its run folder, which names the files that take what it prints.
        said_in: where these come to lie, if not in the folder where it runs.
        brake: on the networks of a verb of `polyrhythm`.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        folder: Path,
        run: Path,
        said_in: Path | None = None,
        brake: Brake | None = None,
    ) -> None:
        self.run = run
        self._brake = brake
        self._read: tuple[tuple[int, int], list[Event]] = ((0, 0), [])  # file and size, and the events in it
        self._out, self._err = ((said_in or folder) / f"{run.name}.{stream}" for stream in ("out", "err"))
        words = [str(word) for word in command]
        self.process: Verb | subprocess.Popen[bytes]
        if words[0] == POLYRHYTHM:
            self.process = Verb(words[1:], folder, (self._out, self._err), environment(), brake)
            return
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environment(), stdout=out, stderr=err, start_new_session=True
            )

    def children(self) -> list[int]:
        """Its processes, in the order of their ranks."""
        return children(self.process.pid)

    def go_on(self) -> None:
        """Releases its brake."""
        assert self._brake is not None
        self._brake.release()

    def wait_for(self, happened: Callable[[Event], bool]) -> Event:
        """Waits for an event of the run."""
        return wait_for(lambda: self.find(happened), f"an event of {self.run}")

    def find(self, happened: Callable[[Event], bool]) -> Event | None:
        """Gives the first such event; fails if the run has ended without one."""
        ended = self.process.poll() is not None  # asked first, since its last words may be what is looked for
        found = next((event for event in self._events() if happened(event)), None)
        if found is None and ended:
            raise AssertionError(f"it ended: {self._said()}")
        return found

    def _events(self) -> list[Event]:
        """Reads the log if it has grown since it was looked at."""
        log = self.run / "events.jsonl"
        if not log.exists():
            return []
        status = log.stat()
        if (stamp := (status.st_ino, status.st_size)) != self._read[0]:
            self._read = stamp, read_events(log)
        return self._read[1]

    def result(self) -> Result:
        """Waits for the end."""
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            told = stacks_of_children()
            self.end()
            raise AssertionError(f"{self.run.name} does not end: {self._said()}\n{told}") from None
        except BaseException:  # such as a test's own limit
            self.end()
            raise
        return Result(status, self._out.read_text(), self._err.read_text())

    def end(self) -> None:
        """Kills it with all that it has started, and waits until they are gone."""
        everyone = {self.process.pid, *descendants(self.process.pid), *members(self.process.pid)}
        if self.process.poll() is not None:
            everyone.discard(self.process.pid)
        kill(everyone)
        self.process.wait(PATIENCE_S)
        wait_for(lambda: are_gone(everyone), f"the processes of {self.run.name} to leave")

    def _said(self) -> str:
        return f"{self._err.read_text()}{self._out.read_text()}" if self._err.exists() else ""


def finished(command: Sequence[str | Path], folder: Path) -> Result:
    """Runs a program in a folder, to its end; what it prints is kept elsewhere."""
    with tempfile.TemporaryDirectory() as kept:
        return Started(command, folder, Path(kept) / Path(command[0]).name, said_in=Path(kept)).result()


def shell(folder: Path, *commands: Sequence[str | Path]) -> list[Result]:
    """Runs verbs one after the other in a folder."""
    return [finished([POLYRHYTHM, *command], folder) for command in commands]


def wait_for(look: Callable[[], Found | None], what: str) -> Found:
    """Looks until there is something."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(_LOOK_EVERY_S)
    raise AssertionError(f"waited too long for {what}\n{stacks_of_children()}")


def environment() -> dict[str, str]:
    """The environment of commands: one thread a process, and nothing of a surrounding torchrun."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    }
    return {**kept, "OMP_NUM_THREADS": "1"}
