"""What `make test` runs of the whole suite: the cases of the table in `sample.md`, and a quarter of drawn seeds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from polyrhythm.simulation.trials import Failure, Trial, try_seeds

whole = True
"""Whether all tests run; set from the command line before tests are collected."""


def seeds(drawn: range) -> range:
    """Return these seeds of a test over drawn runs, or every fourth of them where only the sample runs."""
    return drawn if whole else drawn[::4]


def failures_of(trial: Trial, drawn: range) -> tuple[Failure, ...]:
    """Return what went wrong in a trial with these seeds, or with every fourth of them where only the sample runs."""
    tried = try_seeds(trial, seeds(drawn))
    assert tried.seeds == len(seeds(drawn))
    return tried.failures


def has(test: str) -> bool:
    """Return whether a test (`tests/FILE::NAME`) is in the sample: its file has no row, or its name a part of it."""
    file, _, name = test.partition("::")
    parts = _table().get(file.partition("tests/")[2])
    return parts is None or any(part in name for part in parts)


@cache
def _table() -> dict[str, list[str]]:
    rows = (line.split(" | ") for line in Path(__file__).with_suffix(".md").read_text().splitlines())
    return {row[0].strip(" `|"): re.findall("`([^`]+)`", row[1]) for row in rows if row[0].startswith("| `")}
