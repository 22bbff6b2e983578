"""Empirical: times that were measured, drawn with replacement."""

from __future__ import annotations

from functools import cached_property
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

from polyrhythm.errors import RequestError
from polyrhythm.simulation.step_time import StepTime


class Empirical(StepTime):
    """Measured times, all equally likely.

    Attributes:
        file: a text file with a number of seconds per line; empty lines are skipped. A relative path starts at the
            working directory.
    """

    file: str

    def model_post_init(self, context: Any) -> None:
        """Read the file, so that an error in it is raised at once."""
        _ = self.seconds

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The measured times.

        Raises:
            RequestError: there is no such file, or it holds something else than positive numbers.
        """
        try:
            lines = Path(self.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise RequestError(f"step time empirical: cannot read {self.file}: {reason}") from None
        times = tuple(
            _seconds(self.file, number, line) for number, line in enumerate(lines, 1) if line.strip()
        )
        if not times:
            raise RequestError(f"step time empirical: {self.file} is empty: write a number of seconds a line")
        return times

    def draw(self, generator: Random) -> float:
        return generator.choice(self.seconds)


def _seconds(file: str, number: int, line: str) -> float:
    try:
        seconds = float(line)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise RequestError(
            f"step time empirical: line {number} of {file} is not a positive number of seconds (given {line.strip()!r})"
        )
    return seconds
