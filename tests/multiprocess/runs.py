"""Runs of `polyrhythm train` that tests start, look at while they train, and leave to be ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from multiprocess.commands import POLYRHYTHM, Started, are_gone, wait_for

Starter = Callable[..., Started]
"""Takes more arguments, and the `name` of the run folder."""


@contextmanager
def runs(folder: Path, *arguments: str) -> Iterator[Starter]:
    """Gives what starts runs in a folder; nothing of them outlives the block.

    Args:
        folder: where they run, and where their run folders come to lie.
        arguments: of `polyrhythm`, for all of them.
    """
    started: list[Started] = []

    def start(*more: str, name: str = "run") -> Started:
        command = [POLYRHYTHM, *arguments, *more, "--out", name]
        started.append(Started(command, folder, folder / name))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            if command.process.poll() is None:
                _end(command)


def _end(command: Started) -> None:
    ranks = command.children()
    command.process.kill()
    command.process.wait()
    wait_for(lambda: are_gone(ranks), "the ranks to leave")
