from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from polyrhythm.communication.transports.simulated.virtual_time import Deadlock, Task, VirtualTime
from polyrhythm.errors import RunError


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


def test_an_unheard_error_explains_a_standstill() -> None:
    time = VirtualTime()
    time.spawn("child", _fail, awaited=True)
    time.spawn("other", lambda: time.park("what the child would have sent"))
    with pytest.raises(ZeroDivisionError):
        time.run()


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
