"""What `make test` leaves out is what its page says."""

from __future__ import annotations

from pathlib import Path

import sample
from conformance.jobs import strategies


def test_every_row_is_of_a_file_and_every_listed_strategy_is_one() -> None:
    folder = Path(sample.__file__).parent
    assert [file for file in sample._table() if not (folder / file).is_file()] == []
    assert set(sample._listed()) <= set(strategies())
