"""Commands that tests start, look at while they run, and leave to be ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from on_processes.brake import Brake
from on_processes.commands import Started
from on_processes.verb import POLYRHYTHM
from polyrhythm.events import BatchesDrawn
from polyrhythm.reporting.event_log import read_events

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


def places_held(run: Path) -> dict[tuple[int, int], int]:
    """Return how often each place of each epoch's order was drawn, less how often it was given back, if at all."""
    held: Counter[tuple[int, int]] = Counter()
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, BatchesDrawn):
            places = ((event.epoch, place) for place in range(event.start, event.stop))
            (held.update if event.batches else held.subtract)(places)
    return {place: times for place, times in held.items() if times}
