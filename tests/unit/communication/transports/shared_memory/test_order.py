"""Works in the order of their start, by whoever waits or by the helper."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from polyrhythm.communication.transports.shared_memory import collectives as order_module
from polyrhythm.communication.transports.shared_memory.collectives import InOrder, OrderedWork

PATIENCE_S = 20.0


@pytest.fixture
def order() -> Iterator[InOrder]:
    made = InOrder(lambda patient: None)
    yield made
    made.close()


@pytest.fixture
def unhelped(monkeypatch: pytest.MonkeyPatch) -> Iterator[InOrder]:
    """A helper that never comes."""
    monkeypatch.setattr(order_module, "_HELP_AFTER_S", 3600.0)
    monkeypatch.setattr(order_module.InOrder, "_help", lambda self: None)
    made = InOrder(lambda patient: None)
    yield made
    made.close()


def test_waiting_does_what_was_started_before_too_and_no_more(unhelped: InOrder) -> None:
    done: list[int] = []
    works = [unhelped.start(lambda number=number: done.append(number)) for number in range(4)]
    assert (done, works[2].done()) == ([], False)
    works[2].wait()
    assert done == [0, 1, 2]
    assert [work.done() for work in works] == [True, True, True, False]
    works[0].wait()
    assert done == [0, 1, 2]
    with unhelped:
        done.append(9)
    assert done == [0, 1, 2, 3, 9]


def test_what_nobody_waits_for_is_done_by_the_helper(order: InOrder) -> None:
    for _ in range(2):
        done = threading.Event()
        work = order.start(done.set)
        assert done.wait(PATIENCE_S)
        work.wait()
        assert work.done()


def test_errors_reach_who_waits_each_time_and_hold_nobody_up(order: InOrder) -> None:
    failing = order.start(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    done: list[int] = []
    following = order.start(lambda: done.append(1))
    following.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.wait()
    with pytest.raises(ZeroDivisionError), order:
        _ = 1 // 0
    order.start(lambda: done.append(2)).wait()
    assert (done, failing.done()) == ([1, 2], True)


def test_one_who_waits_while_another_works_gets_the_result(unhelped: InOrder) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert go_on.wait(PATIENCE_S)

    work = unhelped.start(slow)
    other = threading.Thread(target=work.wait)
    other.start()
    assert began.wait(PATIENCE_S)
    done: list[int] = []

    def wait() -> None:
        with unhelped:
            done.append(1)
        done.append(2)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert done == []
    go_on.set()
    other.join(PATIENCE_S)
    waiter.join(PATIENCE_S)
    assert (work.done(), done) == (True, [1, 2])


class Snatched(deque[OrderedWork]):
    """Works, of which somebody else does the first just as the helper looks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.snatched = False

    def __getitem__(self, index: Any) -> Any:
        if not self.snatched and len(self):
            self.snatched = True
            self.popleft().do()
        return super().__getitem__(index)


def test_the_helper_outlives_a_work_that_is_taken_from_under_it(order: InOrder) -> None:
    works = order._works = Snatched()
    first, second = threading.Event(), threading.Event()
    order.start(first.set)
    assert first.wait(PATIENCE_S)
    assert works.snatched
    order.start(second.set)
    assert second.wait(PATIENCE_S)
