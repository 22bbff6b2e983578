from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from polyrhythm.communication.transports.simulated.virtual_time import Deadlock, Task, VirtualTime
from polyrhythm.errors import RunError


def test_actions_come_in_the_order_of_their_times() -> None:
    time, seen = VirtualTime(), []
    for at in (3.0, 1.0, 2.0):
        time.at(at, lambda at=at: seen.append((at, time.now())))
    time.run()
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_equal_times_keep_the_order_of_queueing() -> None:
    time, seen = VirtualTime(), []
    for number in range(100):
        time.at(5.0 if number % 2 else 1.0, lambda number=number: seen.append(number))
    time.run()
    assert seen == [*range(0, 100, 2), *range(1, 100, 2)]


def test_sleep_passes_exactly_so_much_time() -> None:
    time, seen = VirtualTime(), []

    def sleeper(name: str, seconds: float) -> None:
        for _ in range(3):
            time.sleep(seconds)
            seen.append((name, time.now()))

    time.spawn("slow", lambda: sleeper("slow", 2.0))
    time.spawn("quick", lambda: sleeper("quick", 1.0))
    time.run()
    # at 2 s the slow one comes first: it was queued for that time before
    assert seen == [
        ("quick", 1.0),
        ("slow", 2.0),
        ("quick", 2.0),
        ("quick", 3.0),
        ("slow", 4.0),
        ("slow", 6.0),
    ]
    assert time.now() == 6.0


def test_a_joined_task_gives_its_result_when_it_ends() -> None:
    time, seen = VirtualTime(), []

    def child() -> str:
        time.sleep(3.0)
        return "done"

    def parent() -> None:
        task = time.spawn("child", child)
        assert not task.ended
        seen.append((time.join(task), time.now()))
        seen.append((time.join(task), time.now()))  # again, at once

    time.spawn("parent", parent)
    time.run()
    assert seen == [("done", 3.0), ("done", 3.0)]


def test_several_tasks_may_join_one() -> None:
    time, seen = VirtualTime(), []
    child = time.spawn("child", lambda: time.sleep(1.0))
    for name in "ab":
        time.spawn(name, lambda name=name: seen.append((time.join(child), name)))
    time.run()
    assert seen == [(None, "a"), (None, "b")]


def test_a_deadlock_names_every_task_and_what_it_waits_for() -> None:
    time = VirtualTime()
    time.spawn("worker 0", lambda: time.park("a message from rank 1"))
    time.spawn("done", lambda: None)
    last = time.spawn("worker 1", lambda: time.park("a message from rank 0"))
    time.spawn("parent", lambda: time.join(last))
    with pytest.raises(Deadlock) as caught:
        time.run()
    assert str(caught.value) == (
        "deadlock: worker 0 waits for a message from rank 1; worker 1 waits for a message from rank 0; "
        "parent waits for the end of worker 1"
    )
    assert isinstance(caught.value, RunError)


def _fail() -> None:
    raise ZeroDivisionError("on purpose")


def test_an_error_in_a_task_surfaces() -> None:
    time = VirtualTime()
    time.spawn("healthy", lambda: time.park("ever"))
    time.spawn("broken", _fail)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        time.run()


def test_an_error_goes_to_who_joins() -> None:
    time, seen = VirtualTime(), []

    def failing() -> None:
        time.sleep(1.0)
        _fail()

    def parent() -> None:
        with pytest.raises(ZeroDivisionError):
            time.join(time.spawn("child", failing))
        seen.append(time.now())

    time.spawn("parent", parent)
    time.run()
    assert seen == [1.0]


def test_an_awaited_tasks_error_waits_to_be_heard() -> None:
    time, seen = VirtualTime(), []

    def parent() -> None:
        task = time.spawn("child", _fail, awaited=True)
        time.sleep(2.0)
        assert task.ended
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                time.join(task)
        seen.append(time.now())

    time.spawn("parent", parent)
    time.run()
    assert seen == [2.0]


def test_an_unheard_error_explains_a_standstill() -> None:
    time = VirtualTime()
    time.spawn("child", _fail, awaited=True)
    time.spawn("other", lambda: time.park("what the child would have sent"))
    with pytest.raises(ZeroDivisionError):
        time.run()


def test_only_tasks_can_wait() -> None:
    with pytest.raises(AssertionError, match="only a task"):
        VirtualTime().sleep(1.0)


@pytest.mark.parametrize("work", [lambda: 5, lambda: None])
def test_ended_tasks_are_forgotten(work: Callable[[], object]) -> None:
    time = VirtualTime()
    tasks = [weakref.ref(time.spawn(f"task {number}", work)) for number in range(10)]
    joined: list[weakref.ref[Task]] = []

    def parent() -> None:
        for _ in range(10):
            task = time.spawn("child", lambda: time.sleep(1.0))
            joined.append(weakref.ref(task))
            time.join(task)

    time.spawn("parent", parent)
    time.run()
    gc.collect()
    assert [task() for task in tasks + joined] == [None] * 20


def test_the_same_program_gives_the_same_trace() -> None:
    def trace() -> list[tuple[float, int]]:
        time, seen = VirtualTime(), []

        def worker(number: int) -> None:
            for step in range(20):
                time.sleep(((number * 7 + step * 3) % 5) * 0.1)
                seen.append((time.now(), number))

        for number in range(10):
            time.spawn(f"worker {number}", lambda number=number: worker(number))
        time.run()
        return seen

    first = trace()
    assert len(first) == 200
    assert trace() == first


def test_a_deadlock_of_many_names_the_first_and_counts_the_others() -> None:
    time = VirtualTime()
    for number in range(1000):
        time.spawn(f"worker {number}", lambda number=number: time.park(f"a message from rank {number + 1}"))  # type: ignore[misc]
    with pytest.raises(
        Deadlock, match=r"worker 0 waits for a message from rank 1; .*; and 984 more wait$"
    ) as caught:
        time.run()
    assert len(str(caught.value)) < 1000


def test_a_killed_owners_tasks_end_where_they_are_and_others_go_on():
    time, owner, trace = VirtualTime(), object(), []

    def victim():
        try:
            time.join(time.spawn("helper", helper, awaited=True, owner=owner))
        finally:
            trace.append(("victim", time.now()))
            time.sleep(1.0)  # nobody comes back from here
            trace.append("never")

    def helper():
        time.sleep(9.0)
        trace.append("never")

    def other():
        time.sleep(5.0)
        trace.append(("other", time.now()))

    time.spawn("victim", victim, owner=owner)
    time.spawn("early", lambda: trace.append("early"), owner=object())
    time.spawn("other", other)
    time.at(3.0, lambda: time.kill(owner))
    time.run()
    assert trace == ["early", ("victim", 3.0), ("other", 5.0)]


def test_a_task_that_is_killed_before_it_begins_does_nothing():
    time, owner, trace = VirtualTime(), object(), []

    def kill_next():
        time.spawn("never", lambda: trace.append("never"), owner=owner)
        time.kill(owner)

    time.at(1.0, kill_next)
    time.run()
    assert trace == []


def test_a_parked_task_is_handed_what_it_waits_for():
    time, seen = VirtualTime(), []

    def waiter() -> None:
        seen.append((time.park("a thing"), time.now()))
        seen.append((time.park("to be woken"), time.now()))

    task = time.spawn("waiter", waiter)
    time.at(2.0, lambda: task.switch("a thing"))
    time.at(3.0, lambda: time.wake(task))
    time.at(4.0, lambda: task.switch("too late"))  # it has ended: nothing happens
    time.run()
    assert seen == [("a thing", 2.0), ((), 3.0)]
    assert task.ended


def test_an_error_during_a_kill_is_the_dead_ones_own():
    time, owner, trace = VirtualTime(), object(), []

    def victim() -> None:
        try:
            time.park("ever")
        finally:
            raise ZeroDivisionError("while dying")

    task = time.spawn("victim", victim, owner=owner)
    time.spawn("other", lambda: (time.sleep(2.0), trace.append(time.now())))
    time.at(1.0, lambda: time.kill(owner))
    time.run()
    assert trace == [2.0]
    assert isinstance(task.error, ZeroDivisionError)


class _Held:
    """Something that a task holds."""


@pytest.mark.parametrize("closes", [True, False])
def test_what_a_parked_task_holds_is_let_go_only_when_the_time_is_closed(closes: bool) -> None:
    def leave_someone_parked() -> weakref.ref[_Held]:
        time, refs = VirtualTime(), []

        def wait_forever() -> None:
            held = _Held()
            refs.append(weakref.ref(held))
            time.park("nothing")

        time.spawn("parked", wait_forever)
        with pytest.raises(Deadlock):
            time.run()
        if closes:
            time.close()
        return refs[0]

    ref = leave_someone_parked()
    gc.collect()
    assert (ref() is None) == closes


def test_closing_ends_tasks_where_they_are_even_if_they_park_once_more() -> None:
    time, seen = VirtualTime(), []

    def stubborn() -> None:
        try:
            time.park("nothing")
        finally:
            seen.append("left")
            time.sleep(1.0)

    task = time.spawn("stubborn", stubborn)
    with pytest.raises(Deadlock):
        time.run()
    time.close()
    assert (task.ended, seen, time.queued) == (True, ["left"], 0)


def test_there_is_a_last_place_when_neither_the_line_nor_the_heap_has_anything_left_for_the_time() -> None:
    time, seen = VirtualTime(), []

    def look() -> None:
        seen.append(time.last_place() is not None)

    def look_with_another_behind() -> None:
        time.soon(lambda: None)
        look()

    time.at(1.0, look)  # another is due at the same time
    time.at(1.0, look_with_another_behind)
    time.at(2.0, look)
    time.at(3.0, lambda: None)
    time.run()
    assert seen == [False, False, True]


def test_time_passes_at_once_where_nothing_else_is_to_be_done_until_then() -> None:
    time, seen = VirtualTime(), []

    def first() -> None:
        place = time.last_place()
        assert place is not None
        time.finish(3.0, place, lambda: seen.append(("finished", time.now())))
        seen.append(("after", time.now()))

    time.at(1.0, first)
    time.at(5.0, lambda: seen.append(("queued", time.now())))
    time.run()
    assert seen == [("finished", 3.0), ("after", 3.0), ("queued", 5.0)]


@pytest.mark.parametrize(("due_s", "first"), [(2.0, "other"), (3.0, "other"), (4.0, "finished")])
def test_what_is_due_until_then_is_done_before(due_s: float, first: str) -> None:
    time, seen = VirtualTime(), []

    def last() -> None:
        place = time.last_place()
        assert place is not None
        time.finish(3.0, place, lambda: seen.append("finished"))

    time.at(due_s, lambda: seen.append("other"))
    time.at(1.0, last)
    time.run()
    assert seen[0] == first
    assert sorted(seen) == ["finished", "other"]


def test_a_place_is_kept_before_what_is_queued_after_it_was_taken() -> None:
    time, seen = VirtualTime(), []

    def last() -> None:
        place = time.last_place()
        assert place is not None
        time.at(3.0, lambda: seen.append("later"))
        time.finish(3.0, place, lambda: seen.append("kept its place"))

    time.at(1.0, last)
    time.run()
    assert seen == ["kept its place", "later"]


def test_time_does_not_pass_over_what_is_to_be_done() -> None:
    time, passed = VirtualTime(), []
    time.at(1.0, lambda: passed.append((time.pass_to(2.0), time.pass_to(1.5), time.now())))
    time.at(2.0, lambda: None)
    time.run()
    assert passed == [(False, True, 1.5)]
