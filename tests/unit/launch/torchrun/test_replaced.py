"""A rank whose rank 0 has been started again alone."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

import pytest

from conformance.clean_process import CONTEXT
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.launch.torchrun import gathering
from polyrhythm.launch.torchrun.gathering import Gathered, end_start, gather, leave_with_start

PATIENCE_S = 60


def trains(port: int, name: str, pipe: Connection) -> None:
    """Does what a rank does that has come too far to gather again, and waits for a rank 0 that is gone."""
    outside = local(1, 2, port)
    leave_with_start(outside, Gathered(outside, name))
    pipe.send("trains")
    threading.Event().wait(PATIENCE_S)


def test_it_leaves_soon_after_another_start_has_been_named() -> None:
    store = host_store()
    start = gather(local(0, 1, store.port))
    ours, theirs = CONTEXT.Pipe()
    rank = CONTEXT.Process(target=trains, args=(store.port, start.name, theirs))
    rank.start()
    try:
        assert ours.poll(PATIENCE_S)
        assert ours.recv() == "trains"
        gather(local(0, 1, store.port))
        rank.join(PATIENCE_S)
        assert rank.exitcode == 1
    finally:
        rank.kill()


def test_it_stays_for_the_next_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(gathering, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(os, "_exit", exits.append)
    store = host_store()
    leader, outside = local(0, 1, store.port), local(1, 2, store.port)
    for ends, expected in ((True, []), (False, [1])):
        start = gather(leader)
        leave_with_start(outside, start)
        (watch,) = [thread for thread in threading.enumerate() if thread.name == "replaced"]
        if ends:
            end_start(leader, start)
        gather(leader)
        watch.join(PATIENCE_S)
        assert exits == expected
