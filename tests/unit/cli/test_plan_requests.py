"""How `plan` reads amounts of money and time."""

from __future__ import annotations

import pytest

from polyrhythm.cli.plan import _money, _seconds
from polyrhythm.errors import RequestError


@pytest.mark.parametrize(
    ("text", "read"), [("20", (20.0, "")), ("20USD", (20.0, "USD")), (" 1.5 EUR ", (1.5, "EUR"))]
)
def test_budgets(text: str, read: tuple[float, str]) -> None:
    assert _money(text) == read


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)]
)
def test_deadlines(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "USD", "1.2.3", "2 weeks", "-5"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot read the deadline"):
        _seconds(text)


def test_a_budget_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot read the budget"):
        _money("twenty")
