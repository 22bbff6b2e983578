"""Runs the command line in processes of its own, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conformance.clean_process import CONTEXT
from polyrhythm.cli.main import main
from polyrhythm.events import Event
from polyrhythm.reporting.event_log import read_events

POLYRHYTHM = str(Path(sys.executable).with_name("polyrhythm"))
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


class _Verb:
    """A verb of the command line in a process of its own, which has its imports from a clean one; used like `Popen`.

    Args:
        arguments: of `polyrhythm`.
        folder: where it runs.
        streams: the files that take what it prints: standard output and standard error.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, streams: tuple[Path, Path]) -> None:
        given = (list(arguments), str(folder), tuple(map(str, streams)), environment())
        self._process = CONTEXT.Process(target=_run_verb, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("polyrhythm", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _run_verb(arguments: list[str], folder: str, streams: tuple[str, str], variables: dict[str, str]) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [POLYRHYTHM, *arguments]
    for number, stream in enumerate(streams, start=1):
        descriptor = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    main(arguments)


def shell(folder: Path, *commands: Sequence[str | Path]) -> list[Result]:
    """Runs verbs one after the other in a folder."""
    results = []
    for number, command in enumerate(commands):
        with tempfile.TemporaryDirectory() as kept:
            streams = Path(kept) / f"{number}.out", Path(kept) / f"{number}.err"
            verb = _Verb([str(word) for word in command], folder, streams)
            status = verb.wait(PATIENCE_S)
            results.append(Result(status, *(stream.read_text() for stream in streams)))
    return results


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
        words = [str(word) for word in command]
        self.process: _Verb | subprocess.Popen[bytes]
        if words[0] == POLYRHYTHM:
            self.process = _Verb(words[1:], folder, (self._out, self._err))
            return
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environment(), stdout=out, stderr=err, start_new_session=True
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
