"""Interval between two checkpoints of a run: a number of steps or epochs, or a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from polyrhythm.errors import RequestError

_TEXT = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_MOST = 10**9


@dataclass(frozen=True)
class Interval:
    """Interval between two checkpoints.

    Attributes:
        count: number of units, above 0; whole except for seconds.
        unit: unit of `count`.
    """

    count: float
    unit: Literal["steps", "s", "epochs"]

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Read `100steps`, `30s`, `10min`, `2h` or `1epoch`.

        Raises:
            RequestError: the text is none of these.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is not None:
            count, unit = float(found[1]), found[2]
            if unit in _SECONDS and 0 < count * _SECONDS[unit] <= _MOST:
                return cls(count * _SECONDS[unit], "s")
            name = unit.removesuffix("s")
            if name in ("step", "epoch") and count == int(count) and 0 < count <= _MOST:
                return cls(int(count), "steps" if name == "step" else "epochs")
        raise RequestError(
            f"cannot read the interval {text!r}: write 100steps, 10min (or s, h) or 1epoch, with a number above 0"
        )

    def ends_with(self, epochs: int) -> bool:
        """Whether a checkpoint is due after this number of epochs; False for other units than epochs."""
        return self.unit == "epochs" and epochs % self.count == 0

    def __str__(self) -> str:
        return f"{self.count:g}{self.unit}"


EVERY_EPOCH = Interval(1, "epochs")


class Milestones:
    """Steps or epochs after which a worker's state is due, the same on all workers in lockstep.

    Args:
        every: interval between checkpoints; one in time has no milestones.
        at_least: minimum number of steps between two.
    """

    def __init__(self, every: Interval, at_least: int = 1) -> None:
        self._every = every
        self._count = max(int(every.count), at_least) if every.unit == "steps" else max(1, int(every.count))
        self._since: int | None = None

    def passed(self, steps: int, epochs: int) -> bool:
        """Return whether a milestone has been reached since the previous call."""
        done = {"steps": steps, "epochs": epochs, "s": 0}[self._every.unit]
        since, self._since = self._since, done
        return since is not None and done // self._count > since // self._count
