"""Commands that tests start, look at while they run, and leave to be ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from on_processes.brake import Brake
from on_processes.commands import Started
from on_processes.verb import POLYRHYTHM

Starter = Callable[..., Started]
"""Takes more arguments, and the `name` of the run folder."""


@contextmanager
def ending() -> Iterator[list[Started]]:
    """Gives a list to put commands in; nothing of them outlives the block."""
    started: list[Started] = []
    try:
        yield started
    finally:
        for command in started:
            command.end()


@contextmanager
def runs(folder: Path, *arguments: str, brake: Brake | None = None) -> Iterator[Starter]:
    """Gives what starts runs of `polyrhythm` in a folder; nothing of them outlives the block.

    Args:
        folder: where they run, and where their run folders come to lie.
        arguments: of `polyrhythm`, for all of them.
        brake: on the networks of all of them, if any.
    """
    with ending() as started:

        def start(*more: str, name: str = "run") -> Started:
            command = [POLYRHYTHM, *arguments, *more, "--out", name]
            started.append(Started(command, folder, folder / name, brake=brake))
            return started[-1]

        yield start
