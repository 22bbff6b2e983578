"""Processes that torchrun starts again, by host and unequally often, with one store for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, host_store, local
from polyrhythm.launch.gathering import gather

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
