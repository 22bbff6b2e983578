"""What `make test` leaves out is what its page says."""

from __future__ import annotations

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


def test_each_test_has_a_case_in_the_sample_and_most_cases_of_large_ones_are_left_out() -> None:
    counts = range(1, 60)
    names = [f"tests/unit/test_it.py::test_{count}[{case}]" for count in counts for case in range(count)]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    kept = Counter(item.nodeid.partition("[")[0] for item in sample.chosen(items))
    assert len(kept) == len(counts)
    assert kept.total() < len(names) / 3
