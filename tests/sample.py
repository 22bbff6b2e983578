"""What `make test` runs of the whole suite: the cases that `sample.md` names, and a quarter of drawn seeds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

from conformance.jobs import strategies
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


_STRATEGIES = 8
"""If a test is run for more strategies, the sample has those that `sample.md` lists."""

_CASES, _KEPT = 5, 4
"""If a test without processes has more cases, the sample has one of four of them, and so some of each test."""


def chosen(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that are in the sample: see `sample.md`."""
    kept = [item for item in items if _has_row(item.nodeid)]
    strategies_of: defaultdict[str, set[str]] = defaultdict(set)
    for item in kept:
        strategies_of[_function(item)] |= _strategies(item)
    listed = set(_listed())
    kept = [
        item
        for item in kept
        if len(strategies_of[_function(item)]) <= _STRATEGIES
        or not (own := _strategies(item))
        or own & listed
    ]
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for item in kept:
        cases[_function(item)].append(item.nodeid)
    left = {name for names in cases.values() for name in _stand_ins(names)}
    return [item for item in kept if item.nodeid in left or "tests/on_processes/" in item.nodeid]


def _stand_ins(names: list[str]) -> list[str]:
    """Return the cases of a test that stand for all of them, in an order that does not depend on their number."""
    if len(names) <= _CASES:
        return names
    return sorted(names, key=lambda name: crc32(name.encode()))[: -(-len(names) // _KEPT)]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _strategies(item: pytest.Item) -> set[str]:
    values: Sequence[object] = [*item.callspec.params.values()] if hasattr(item, "callspec") else []
    return {value for value in values if isinstance(value, str)} & _all_strategies()


def _has_row(test: str) -> bool:
    file, _, name = test.partition("::")
    if name.partition("[")[0] in _long():
        return False
    parts = _table().get(file.partition("tests/")[2])
    return parts is None or any(part in name for part in parts)


@cache
def _all_strategies() -> set[str]:
    return set(strategies())


def _text() -> str:
    return Path(__file__).with_suffix(".md").read_text()


@cache
def _listed() -> list[str]:
    (line,) = (line for line in _text().splitlines() if line.startswith("Strategies: "))
    return re.findall("`([^`]+)`", line)


@cache
def _long() -> set[str]:
    return set(re.findall(r"^\| `(test_\w+)` \|", _text(), re.MULTILINE))


@cache
def _table() -> dict[str, list[str]]:
    rows = (line.split(" | ") for line in _text().splitlines())
    files = [row for row in rows if re.match(r"\| `\w+/", row[0])]
    return {row[0].strip(" `|"): re.findall("`([^`]+)`", row[1]) for row in files}
