"""The barrier's waiting: who is missed, and who only seems to be missing."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.shared_memory.barrier import (
    LINE_WORDS,
    Barrier,
    Lifelines,
    is_tso,
)

RANKS = (4, 7, 9)


def _words() -> memoryview:
    return memoryview(bytearray(8 * LINE_WORDS * len(RANKS))).cast("q")


def _barriers(words: memoryview, lifelines: Lifelines | None = None) -> list[Barrier]:
    return [Barrier(words, member, RANKS, lifelines or Lifelines([])) for member in range(len(RANKS))]


def _ended_process() -> tuple[subprocess.Popen[bytes], Lifelines]:
    """Gives a process that has ended and that nobody has taken leave of, and lifelines in which it is member 1."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    lifelines = Lifelines([os.getpid(), child.pid, os.getpid()])
    assert lifelines.ended() == set()
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # and stays a zombie
    return child, lifelines


def test_descriptions_are_published_by_the_next_barrier() -> None:
    barriers = _barriers(_words())
    for turn in range(1, 6):
        threads = []
        for member, barrier in enumerate(barriers):
            threads.append(threading.Thread(target=barrier.cross, args=(100 * turn + member,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        for barrier in barriers:
            assert barrier.crossed == turn
            assert barrier.descriptions() == [100 * turn, 100 * turn + 1, 100 * turn + 2]


def test_a_process_that_ended_is_missed_even_as_a_zombie() -> None:
    child, lifelines = _ended_process()
    try:
        with pytest.raises(
            CollectiveBroken, match=r"^a collective broke, so a rank is gone: rank 7 has died$"
        ) as caught:
            _barriers(_words(), lifelines)[0].cross()
        assert caught.value.rank == 7
    finally:
        child.wait()
        lifelines.close()


def test_who_came_before_it_ended_is_not_missed() -> None:
    child, lifelines = _ended_process()
    try:
        words = _words()
        words[LINE_WORDS] = 1  # member 1 came
        barrier = _barriers(words, lifelines)[0]
        waiting = threading.Thread(target=barrier.cross)
        waiting.start()
        words[2 * LINE_WORDS] = 1  # and at last member 2
        waiting.join(10)
        assert not waiting.is_alive()
        assert barrier.crossed == 1
    finally:
        child.wait()
        lifelines.close()


def test_who_has_left_is_missed() -> None:
    first, second, _ = _barriers(_words())
    second.leave()
    with pytest.raises(CollectiveBroken, match=r"rank 7 has left$") as caught:
        first.cross()
    assert caught.value.rank == 7


def test_who_misses_somebody_is_missed_and_names_him() -> None:
    first, second, _ = _barriers(_words())
    second.give_up(9)
    second.leave()  # changes nothing: the reason stays
    with pytest.raises(CollectiveBroken, match=r"rank 7 misses rank 9$") as caught:
        first.cross()
    assert caught.value.rank == 9


def test_who_has_failed_is_missed() -> None:
    first, second, _ = _barriers(_words())
    second.give_up(7)
    with pytest.raises(CollectiveBroken, match=r"rank 7 has failed$") as caught:
        first.cross()
    assert caught.value.rank == 7


@pytest.mark.parametrize(
    ("machine", "ordered"), [("x86_64", True), ("AMD64", True), ("aarch64", False), ("riscv64", False)]
)
def test_only_machines_that_keep_the_order_of_stores_qualify(
    monkeypatch: pytest.MonkeyPatch, machine: str, ordered: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert is_tso() is ordered


@pytest.mark.parametrize(("cores", "looks"), [(3, 100), (2, 10)])
def test_who_shares_no_core_looks_for_longer_before_it_sleeps(
    cores: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looked = 0.0, 0

    def clock() -> float:
        nonlocal now_s
        now_s += 10e-6
        return now_s

    def give_way() -> None:
        nonlocal looked
        looked += 1

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(os, "sched_yield", give_way)
    waiting = _barriers(_words())[0]
    monkeypatch.setattr(time, "perf_counter", clock)
    assert not waiting._spin(1)
    assert looks <= looked <= looks + 1
