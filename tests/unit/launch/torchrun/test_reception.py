"""Who is let into a run that torchrun has started, and who is told of losses: over a real store, without a run."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch.distributed as dist

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, host_store, local
from polyrhythm.events import Event, Notice, RunEnded, RunStarted, WorkerLost
from polyrhythm.launch.joining.connections import Address, door_key
from polyrhythm.launch.joining.join_client import JoinClient
from polyrhythm.launch.joining.join_server import Entrance, Inside
from polyrhythm.launch.torchrun.gathering import Gathered, RunIsOver, gather
from polyrhythm.launch.torchrun.reception import Calls, Reception
from polyrhythm.launch.watchdog import Pulse, publish
from polyrhythm.strategies.role_assignment import RoleAssignment

TOKEN = "the token of this test"
CAST = RoleAssignment((0, 1, 3, 4), (2,))
STARTED = range(4)  # rank 4 is a place for a guest
NAME = "start"


class Run:
    """A run's reception, and the store where its ranks meet."""

    def __init__(self, entrance: Entrance | None = None) -> None:
        self.store: Any = host_store()
        self.said: list[Event] = []
        self.leader = local(0, CAST.size, self.store.port)
        self.reception = Reception(self.leader, CAST, STARTED, self.said.append, entrance)
        self.reception.launcher.open(Inside(Address("127.0.0.1", self.store.port), CAST, NAME))

    def begin(self) -> None:
        numbers = dict.fromkeys(
            ("workers", "servers", "epochs", "steps_per_epoch", "steps", "start_step", "start_epoch"), 1
        )
        names = {"strategy": "ssp", "data": "digits", "model": "mlp"}
        self.reception.on_event(RunStarted(time_s=0, **names, **numbers, earlier_s=0.0, parameters=42))

    def lose(self, rank: int) -> None:
        self.reception.on_event(WorkerLost(time_s=1, worker=CAST.workers.index(rank), rank=rank, step=7))

    def hears(self, to: Peer, *words: str) -> bool:
        """Whether it is told these words, which may be on their way, and no others that are there."""
        queue = f"words/{to.rank}/{to.generation}"
        found = [self.store.queue_pop(queue).decode() for _ in words]
        return found == list(words) and not self.store.queue_len(queue)

    def end(self, outcome: str = "done") -> None:
        self.reception.on_event(RunEnded(time_s=9, outcome=outcome, result={}))


@pytest.fixture
def run() -> Run:
    return Run()


def test_all_are_told_of_places_that_nobody_has_yet_and_of_who_is_lost(run: Run) -> None:
    assert all(run.hears(Peer(rank, 0), "4 0") for rank in STARTED)
    run.begin()
    run.lose(1)
    assert all(run.hears(Peer(rank, 0), "1 0") for rank in (0, 2, 3))
    assert run.hears(Peer(1, 0))


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    made = Entrance(Address("127.0.0.1", 0), TOKEN)
    made.offer, made.how = {"version": "1"}, "others may join"
    yield made
    made.close()


def test_a_guest_takes_a_vacant_place_and_who_is_there_is_told_when_it_goes(entrance: Entrance) -> None:
    run = Run(entrance)
    door = run.reception.launcher.join_server
    assert door is not None
    run.begin()
    run.lose(3)
    visit = JoinClient(entrance.address, door_key(TOKEN))
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(visit.take_place)
        while not coming.done():
            wait([door], 0.1)
            run.reception.launcher.look()
    place = coming.result()
    assert (place.peer, place.parameters, place.roles, place.prefix) == (Peer(3, 1), 42, CAST, NAME)
    assert run.hears(Peer(3, 1), "4 0")
    said = [event.text for event in run.said if isinstance(event, Notice)]
    assert said[:2] == ["others may join", "the place of worker 2 (rank 3) is vacant for a joining worker"]
    assert said[2].endswith(" takes the place of worker 2 (rank 3)")
    admit: list[int] = []
    run.reception.call(3, admit.append)  # its torchrun starts it again, but a guest is there
    assert admit == []
    assert run.hears(Peer(0, 0), "4 0", "3 0")
    visit.leave("its host asked it to")
    while not admit:
        run.reception.launcher.look()
    assert admit == [2]
    assert run.hears(Peer(0, 0), "3 1")
    visit.close()


class Living:
    """A store of pulses in which rank 1 has another each time somebody looks, for as long as it lives."""

    def __init__(self, store: Any) -> None:
        self.lives, self.looked = True, threading.Semaphore(0)
        self._store, self._beats = store, itertools.count()

    def clone(self) -> Living:
        return self

    def check(self, keys: list[str]) -> bool:
        if self.lives:
            publish(self._store, Pulse(1, 0, "worker 1", beat=next(self._beats)))
        self.looked.release()
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._store.multi_get(keys))


class TestCalls:
    def outside(self, run: Run, rank: int) -> Rendezvous:
        return local(rank, 4, run.store.port)

    def calls(self, run: Run, silence_s: float = 60.0, pulses: Any = None) -> Calls:
        outside = self.outside(run, 0)
        inside = replace(outside, store=pulses or dist.PrefixStore(NAME, outside.store))
        return Calls(outside, Gathered(inside, NAME), run.reception, silence_s)

    def test_one_that_died_unnoticed_is_missed_when_its_successor_calls(self, run: Run) -> None:
        run.begin()
        with self.calls(run, silence_s=0.05):
            start = gather(self.outside(run, 1))
        assert start.rendezvous.generation == 1
        assert run.hears(Peer(3, 0), "4 0", "1 0")

    def test_one_that_lives_keeps_its_rank(self, run: Run) -> None:
        run.begin()
        living = Living(dist.PrefixStore(NAME, self.outside(run, 1).store))
        with ThreadPoolExecutor(1) as pool, self.calls(run, silence_s=0.02, pulses=living):
            coming = pool.submit(gather, self.outside(run, 1))
            try:
                for _ in range(5):
                    assert living.looked.acquire(timeout=20)
                assert not coming.done()
            finally:
                living.lives = False
            assert coming.result(20).rendezvous.generation == 1

    def test_a_lost_rank_comes_in_as_its_successor(self, run: Run) -> None:
        run.begin()
        run.lose(1)
        with self.calls(run):
            start = gather(self.outside(run, 1))
        assert (start.name, start.rendezvous.generation, start.rendezvous.rank) == (NAME, 1, 1)

    def test_who_calls_when_the_run_is_done_is_told_so(self, run: Run) -> None:
        run.begin()
        with self.calls(run):
            waiting = self.outside(run, 1)
            waiting.store.queue_push("calls", b"call 1 0123456789abcdef")  # while the one before lives
            run.end()
        assert waiting.store.get("answer/0123456789abcdef") == b"over"
        with pytest.raises(RunIsOver):
            gather(self.outside(run, 3))

    def test_calls_are_left_to_the_next_start_of_a_run_that_was_interrupted(self, run: Run) -> None:
        run.begin()
        with self.calls(run):
            self.outside(run, 1).store.queue_push("calls", b"call 1 0123456789abcdef")
            run.end("interrupted")
        assert not run.store.check(["answer/0123456789abcdef"])
        assert run.store.queue_pop("calls", False) == b"call 1 0123456789abcdef"
