"""Results of a function from forked processes."""

from __future__ import annotations

import os

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.launch.forked import forked


def test_results_come_in_order_from_other_processes() -> None:
    own = os.getpid()
    found = forked(lambda number: (number**2, os.getpid()), [(number,) for number in range(5)], 2)
    assert [square for square, _ in found] == [0, 1, 4, 9, 16]
    assert own not in {pid for _, pid in found}


def test_one_process_is_this_one() -> None:
    assert forked(os.getpid, [(), ()], 1) == [os.getpid()] * 2
    assert forked(os.getpid, [()], 4) == [os.getpid()]
    assert forked(os.getpid, [], 4) == []


def test_an_error_is_raised_here() -> None:
    def refuse(number: int) -> int:
        if number == 3:
            raise RequestError("three is too many")
        return number

    with pytest.raises(RequestError, match="three is too many"):
        forked(refuse, [(number,) for number in range(6)], 2)
