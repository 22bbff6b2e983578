"""What became of a run to which something happened."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from polyrhythm.api.faults import Outcome

STEPS_ALLOWED, ALLOWED_S = 2, 8.0
"""A death may hold up the others for so many median steps, and so long on a busy machine; it takes milliseconds."""
STARTING_S = 20.0
"""In which a process starts on a busy machine, where all others wait for it."""


@dataclass(frozen=True)
class Seen:
    """What became of a run.

    Attributes:
        outcome: as in the table. Regrouping is a way of going on, which cannot be told from another from outside.
        said: the words in which the run told of it.
        going_on_s: from a death until every worker that lives has finished a step; None where nobody went on.
        step_s: median before it.
        waited: whether the others had to wait for a successor.
    """

    outcome: Outcome
    said: str = ""
    going_on_s: float | None = None
    step_s: float | None = None
    waited: bool = False

    def fits(self, declared: Outcome) -> bool:
        """Whether this is what was declared."""
        return self.outcome is (Outcome.CONTINUES if declared is Outcome.REGROUPS else declared)

    @property
    def in_time(self) -> bool:
        """Whether the others went on as soon as they should."""
        if self.going_on_s is None or self.step_s is None:
            return True
        allowed_s = ALLOWED_S + (STARTING_S if self.waited else 0.0)
        return self.going_on_s <= STEPS_ALLOWED * self.step_s + allowed_s


def step_times(folder: Path, process: int) -> list[float]:
    """Reads when a process began its steps, on the monotonic clock."""
    path = folder / str(process)
    content = path.read_bytes() if path.exists() else b""
    return torch.frombuffer(bytearray(content), dtype=torch.float64).tolist() if content else []


def going_on_s(times: list[list[float]], at_s: float) -> float | None:
    """Gives the seconds from a moment until all have begun a second step after it: one has been finished."""
    later = [[begun for begun in found if begun > at_s] for found in times]
    if any(len(found) < 2 for found in later):
        return None
    return max(found[1] for found in later) - at_s


def median_step_s(times: list[list[float]], until_s: float) -> float:
    """Gives the median time from one step to the next, before a moment."""
    gaps = [after - before for found in times for before, after in pairwise(found) if after <= until_s]
    return statistics.median(gaps)
