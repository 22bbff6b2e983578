"""A verb of the command line in a process of its own, which has its imports from a clean one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.clean_process import CONTEXT
from on_processes.brake import Brake
from polyrhythm.cli.main import main

POLYRHYTHM = str(Path(sys.executable).with_name("polyrhythm"))


class Verb:
    """Is used like `Popen`.

    Args:
        arguments: of `polyrhythm`.
        folder: where it runs.
        streams: the files that take what it prints: standard output and standard error.
        variables: its environment.
        brake: on its networks, if any.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        streams: tuple[Path, Path],
        variables: dict[str, str],
        brake: Brake | None = None,
    ) -> None:
        given = (list(arguments), str(folder), tuple(map(str, streams)), variables, brake)
        self._process = CONTEXT.Process(target=_run, args=given)
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


def _run(
    arguments: list[str],
    folder: str,
    streams: tuple[str, str],
    variables: dict[str, str],
    brake: Brake | None,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [POLYRHYTHM, *arguments]
    for number, stream in enumerate(streams, start=1):
        descriptor = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if brake is not None:
        brake.on_every_model()
    main(arguments)
