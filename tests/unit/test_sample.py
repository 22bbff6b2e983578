"""What `make test` leaves out is what its page says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sample
from conformance.jobs import strategies


def test_every_row_is_of_a_file_and_every_listed_strategy_is_one() -> None:
    folder = Path(sample.__file__).parent
    assert [file for file in sample._table() if not (folder / file).is_file()] == []
    assert set(sample._listed()) <= set(strategies())


def test_long_tests_and_those_that_stand_for_them_exist() -> None:
    tests = Path(sample.__file__).parent
    defined = {
        name for file in tests.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert sample._long() <= defined
    page = (tests / "sample.md").read_text().rpartition("\n\n")[2]
    assert set(re.findall(r"`(test_\w+)`", page)) <= defined


def test_each_test_has_a_case_in_the_sample_and_most_cases_of_large_ones_are_left_out() -> None:
    counts = range(1, 60)
    names = [f"tests/unit/test_it.py::test_{count}[{case}]" for count in counts for case in range(count)]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    kept = Counter(item.nodeid.partition("[")[0] for item in sample.chosen(items))
    assert len(kept) == len(counts)
    assert kept.total() < len(names) / 3
