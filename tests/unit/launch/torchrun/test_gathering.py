"""Processes that torchrun starts again, by host and unequally often, with one store for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, host_store, local
from polyrhythm.errors import RunError
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.torchrun import started_rank as torchrun
from polyrhythm.launch.torchrun.gathering import (
    CALLS,
    Gathered,
    RunIsOver,
    StartIsVoid,
    announce_end,
    call_again,
    check_counts,
    gather,
)
from polyrhythm.strategies.allreduce.synchronous import Synchronous

PATIENCE_S = 20


def start(port: int, size: int) -> list[Rendezvous]:
    """Gathers new processes of all ranks, the leader last."""
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(gather, local(rank, size, port)) for rank in reversed(range(size))]
        return [rank.result(PATIENCE_S).rendezvous for rank in reversed(ranks)]


def names(met: Sequence[Rendezvous], key: str, value: str) -> list[bytes]:
    met[0].store.set(key, value)
    return [bytes(each.store.get(key)) for each in met]


def test_all_find_the_keys_of_their_own_start() -> None:
    store = host_store()
    first = start(store.port, 3)
    assert names(first, "key", "first") == [b"first"] * 3
    again = start(store.port, 3)
    assert not again[2].store.check(["key"])
    assert names(again, "key", "again") == [b"again"] * 3
    assert first[1].store.get("key") == b"first"


def test_calls_of_the_dead_bring_nobody_in() -> None:
    store = host_store()
    for word in ("call 1 0123456789abcdef", "there 1 fedcba9876543210", "call 2 0011223344556677"):
        local(1, 3, store.port).store.queue_push("calls", word.encode())
    leader = local(0, 3, store.port)
    with ThreadPoolExecutor(3) as pool:
        leading = pool.submit(gather, leader)
        second = pool.submit(gather, local(2, 3, store.port)).result(PATIENCE_S)
        assert not leading.done()
        first = pool.submit(gather, local(1, 3, store.port)).result(PATIENCE_S)
        met = [each.rendezvous for each in (leading.result(PATIENCE_S), first, second)]
    assert names(met, "key", "value") == [b"value"] * 3


def test_one_alone_waits_for_nobody() -> None:
    store = host_store()
    assert gather(local(0, 1, store.port)).rendezvous.size == 1


def meet(rank: int, port: int) -> Gathered:
    """Meets as a rank of `train` does: it says where it is, and waits until the start is whole."""
    job: Any = SimpleNamespace(
        strategy=Synchronous(),
        fault_tolerance=SimpleNamespace(vacant=0),
        device=torch.device("cpu"),
        draws=False,
    )
    return torchrun._met(local(rank, 3, port), lambda start, patience: job, Patience(PATIENCE_S))[0]


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_rank_that_dies_before_the_start_is_whole_takes_part_once_it_is_started_again(
    replaced: int,
) -> None:
    store = host_store()
    with ThreadPoolExecutor(4) as pool:
        dead = pool.submit(gather, local(replaced, 3, store.port))  # which does no more than this
        others = [pool.submit(meet, rank, store.port) for rank in range(3) if rank != replaced]
        before = dead.result(PATIENCE_S)
        before.rendezvous.store.wait([f"software/{1 - replaced}"], timedelta(seconds=PATIENCE_S))
        assert not any(other.done() for other in others)
        after = meet(replaced, store.port)
        names = {other.result(PATIENCE_S).name for other in others} | {after.name}
    assert len(names) == 1
    assert before.name not in names
    assert after.rendezvous.generation == 0


def test_a_call_that_comes_twice_makes_no_start_void() -> None:
    store = host_store()
    leader, other = local(0, 2, store.port), local(1, 2, store.port)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(gather, other)
        start = gather(leader)
        called.result(PATIENCE_S)
    (nonce,) = start.answered
    call_again(leader.store, 1, nonce)
    check_counts(leader, start)
    assert leader.store.queue_len(CALLS) == 0
    call_again(leader.store, 1, "0123456789abcdef")
    with pytest.raises(StartIsVoid):
        check_counts(leader, start)
    assert leader.store.queue_len(CALLS) == 1  # for the next start, which answers it


@pytest.mark.parametrize("keeper", [True, False])
def test_of_a_run_with_nothing_left_to_do_all_take_leave(keeper: bool) -> None:
    store = host_store()
    leader = replace(local(0, 3, store.port), keeper=keeper)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(gather, local(rank, 3, store.port)) for rank in (1, 2)]
        announce_end(leader, Patience(PATIENCE_S))
        for other in others:
            with pytest.raises(RunIsOver):
                other.result(PATIENCE_S)


def test_who_hosts_the_store_stays_until_all_have_left_and_nobody_else_does() -> None:
    store = host_store()
    leader = local(0, 2, store.port)
    announce_end(leader, Patience(0))  # the other has left before this one was started again
    with pytest.raises(RunError, match="rank 1 has not joined"):
        announce_end(replace(leader, keeper=True), Patience(0.01))
    with pytest.raises(RunIsOver):
        gather(local(1, 2, store.port))
    announce_end(replace(leader, keeper=True), Patience(0))


def test_ranks_that_never_come_are_named_by_all_who_have_come() -> None:
    store = host_store()
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(torchrun.roles_of, Synchronous(), local(1, 4, store.port), 0, Patience(0.1))
        leading = pool.submit(gather, local(0, 4, store.port), Patience(0.1))
        with pytest.raises(RunError, match=r"^ranks 1, 2 and 3 have not joined within 0\.1 s: "):
            leading.result(PATIENCE_S)
        with pytest.raises(RunError, match=r"^ranks 2 and 3 have not joined within 0\.1 s: "):
            second.result(PATIENCE_S)
