"""Limits of the watchdog, and what it counts as time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from polyrhythm.communication.activity import COMPUTING, Activity
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous, host_store
from polyrhythm.launch import watchdog
from polyrhythm.launch import watchdog as lived_clock
from polyrhythm.launch.watchdog import (
    GAPS,
    CoreUse,
    Pulse,
    Watchdog,
    WatchdogSetting,
    activities,
    cause_of_loss,
    core_use,
    publish,
    read,
)

_LEAVE_IF_CUT_OFF = Watchdog._leave_if_cut_off
_AFAR = "192.0.2.1"


@pytest.fixture(autouse=True)
def _no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no watchdog that waits for a core end the process of the tests."""
    monkeypatch.setattr(Watchdog, "_leave_if_cut_off", lambda self: None)


def setting(
    store: object,
    rank: int,
    said: list[str],
    folder: Path | None = None,
    floor_s: float = 0.3,
    size: int = 2,
    address: str = LOOPBACK,
) -> WatchdogSetting:
    return WatchdogSetting(
        rendezvous=Rendezvous(store, rank, size, address),
        names=[f"worker {worker}" for worker in range(size)],
        host=f"host {rank}",
        activity=Activity(),
        is_lost=lambda rank: False,
        notify=said.append,
        what_then=lambda rank: "the run stops",
        folder=folder,
        floor_s=floor_s,
    )


def await_words(said: list[str], words: str) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [text for text in list(said) if words in text]
        if found:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"nobody said {words!r}, but {said}")


def test_limits_are_a_multiple_of_what_is_measured_and_never_below_the_floor() -> None:
    dog = Watchdog(setting(host_store(), 0, [], floor_s=3.0))
    assert dog.limit_s([]) == 3.0
    assert dog.limit_s([0.1, 0.2, 0.1]) == 3.0
    assert dog.limit_s([1.0, 2.0, 40.0]) == GAPS * 2.0


def test_who_never_beats_again_is_diagnosed_with_stacks_then_taken_for_lost(tmp_path: Path) -> None:
    store, said = host_store(), []  # type: dist.TCPStore, list[str]
    publish(store, Pulse(1, 0, role="worker 1", beat=7, step=17, doing="adding up over ranks 0, 1"))
    with Watchdog(setting(store, 0, said, tmp_path)):
        diagnosis = await_words(said, "has been silent")
        await_words(said, "is taken for lost after")
    silence = re.match(r"worker 1 \(rank 1\) has been silent for (\d+\.\d) s: ", diagnosis)
    assert silence is not None
    assert float(silence[1]) >= 0.3
    assert "last, at step 17, it was adding up over ranks 0, 1." in diagnosis
    assert diagnosis.endswith("and the run stops")
    assert cause_of_loss(store, Peer(1, 0)).startswith("had been silent for ")
    assert cause_of_loss(store, Peer(0, 0)) == ""
    assert "test_watchdog.py" in (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert store.queue_pop("words/0/0", True).decode() == "1 0"  # the last that it does


def test_who_is_cut_off_before_its_first_beat_is_missed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = host_store(), []  # type: dist.TCPStore, list[str]
    with monkeypatch.context() as cut:
        cut.setattr(Watchdog, "_watch", lambda self: None)
        Watchdog(setting(store, 1, said, floor_s=20.0)).__enter__()
    with Watchdog(setting(store, 0, said)):
        assert await_words(said, "is taken for lost after").startswith("worker 1 (rank 1)")


def test_who_beats_or_has_left_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SLOWEST_BEAT_S", 0.02)
    store, said = host_store(), []  # type: dist.TCPStore, list[str]
    with Watchdog(setting(store, 1, said, floor_s=20.0)), Watchdog(setting(store, 0, said, floor_s=20.0)):
        begun = {rank: pulse.beat for rank, pulse in read(store, [0, 1]).items()}
        deadline = time.monotonic() + 20
        while not all(pulse.beat > begun.get(rank, 0) + 12 for rank, pulse in read(store, [0, 1]).items()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert all(pulse.left for pulse in read(store, [0, 1]).values())
    assert not said


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(lived_clock.time, "monotonic", lambda: now_s[0])
    clock = lived_clock.LivedClock()
    for passed_s in (0.5, 0.7, 3600.0, 0.5):
        now_s[0] += passed_s
        clock.tick(0.5)
    assert clock.now_s == pytest.approx(0.5 + 0.7 + 0.75 + 0.5)


def test_a_process_that_waits_for_a_core_is_known_to() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        began = core_use(processes[0].pid)
        assert began.runnable
        deadline = time.monotonic() + 20
        while core_use(processes[0].pid).starved_s(began, 60.0) < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert core_use(processes[0].pid) == CoreUse()


@pytest.mark.parametrize(
    ("host", "ran", "waited", "runnable", "starves"),
    [
        ("host 0", 0, 1, True, True),
        ("host 0", 0, 0, True, True),  # its wait is not over
        ("host 0", 1, 0, True, False),  # it computes, and does not beat
        ("host 0", 0, 0, False, False),  # it is stopped
        ("host 1", 0, 1, True, False),
    ],
)
def test_a_rank_of_this_host_is_not_silent_while_it_waits_for_a_core(
    host: str, ran: int, waited: int, runnable: bool, starves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, said = host_store(), []  # type: dist.TCPStore, list[str]
    publish(store, Pulse(1, 0, role="worker 1", host=host, process=1))
    dog = Watchdog(setting(store, 0, said))
    monkeypatch.setattr(watchdog.os, "kill", lambda process, number: None)

    def used(process: int) -> CoreUse:
        return CoreUse(ran * dog._clock.now_s, waited * dog._clock.now_s, runnable)

    monkeypatch.setattr(watchdog, "core_use", used)
    dog._passed_s = 0.1
    for look in range(100):
        dog._clock.now_s = 0.1 * look
        dog._look_around()
    assert any("is taken for lost" in text for text in said) == (not starves)


def test_what_hundreds_of_ranks_do_is_counted() -> None:
    pulses = [
        Pulse(rank, 0, role=f"worker {rank}", step=3 + rank % 2, doing=f"adding up over ranks 0, {rank}")
        for rank in range(100)
    ]
    computing = [
        Pulse(100 + rank, 0, role=f"worker {100 + rank}", step=4, doing=COMPUTING) for rank in range(28)
    ]
    text = "128 ranks at steps 3 to 4: 100 adding up over ranks …, 28 computing"
    assert activities(pulses + computing) == text
    assert activities(pulses[:2]) == "; ".join(pulse.text for pulse in pulses[:2])


class SilentOnce:
    """A store that does not answer one call, which it may have heard.

    Args:
        store: that it is otherwise.
        number: of the call, from 0.
        heard: whether the call is carried out.
    """

    def __init__(self, store: dist.TCPStore, number: int, *, heard: bool) -> None:
        self._store, self._number, self._heard = store, number, heard
        self.calls = 0
        self.told: list[tuple[str, str]] = []

    def clone(self) -> SilentOnce:
        return self

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            silent = self.calls == self._number
            self.calls += 1
            if silent and not self._heard:
                raise RuntimeError("the store does not answer")
            found = getattr(self._store, name)(*given)
            if name == "queue_push":
                self.told.append((str(given[0]), bytes(given[1]).decode()))  # type: ignore[call-overload]
            if silent:
                raise RuntimeError("the store does not answer")
            return found

        return call


def beats_until_lost(number: int, *, heard: bool) -> tuple[SilentOnce, list[str]]:
    """Lets rank 1 of 3 be silent under rank 0's watch; gives the store, and what was said."""
    inner, said = host_store(), []  # type: dist.TCPStore, list[str]
    store = SilentOnce(inner, number, heard=heard)
    publish(inner, Pulse(1, 0, role="worker 1", beat=7))
    at = replace(setting(inner, 0, said, size=3), is_lost=lambda rank: ("words/0/0", "1 0") in store.told)
    dog = Watchdog(at)
    dog._store = store
    for beat in range(8):
        publish(inner, Pulse(2, 0, role="worker 2", beat=beat))
        dog._clock.now_s = 0.4 * beat
        with suppress(RuntimeError):
            dog._look_around()
    return store, said


def test_a_rank_is_taken_for_lost_once_and_all_hear_it_whenever_the_store_does_not_answer() -> None:
    calls = beats_until_lost(-1, heard=False)[0].calls
    assert calls > 30
    for number in range(calls):
        for heard in (False, True):
            store, said = beats_until_lost(number, heard=heard)
            assert [text.split(" (rank 1) ")[1][:17] for text in said] == [
                "has been silent f",
                "is taken for lost",
            ]
            assert {to for to, word in store.told if word == "1 0"} == {"words/0/0", "words/2/0"}
            assert cause_of_loss(store._store, Peer(1, 0)).startswith("had been silent for ")


class Pauses:
    """In place of the event that ends a watchdog: notes how long is waited, and ends it after so many."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked_s: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.asked_s.append(seconds)
        return len(self.asked_s) > self.count


class Counted:
    """A clock that goes on by a quarter of a second at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def tick(self, beat_s: float) -> float:
        self.now_s += 0.25
        return 0.25


@pytest.mark.parametrize("reachable", [True, False])
def test_only_who_cannot_connect_to_the_store_leaves(
    reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LivedClock", Counted)
    monkeypatch.setattr(watchdog, "answers", lambda store, patience_s: reachable)
    dog = Watchdog(setting(host_store(), 0, [], floor_s=3.0, address=_AFAR))
    connections: list[int] = []
    left: list[str] = []
    monkeypatch.setattr(dog, "_watch", connections.append)
    monkeypatch.setattr(dog, "_leave", left.append)
    dog._asks, dog._over = True, Pauses(400)  # type: ignore[assignment]
    _LEAVE_IF_CUT_OFF(dog)
    if reachable:  # after 100 s of a store that does not answer
        assert not left
        assert 10 < len(connections) < 25
    else:
        assert left
        assert not connections
