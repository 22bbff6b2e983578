"""The launcher's watch, as far as it can be seen without processes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

from conformance.jobs import make_job
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed import rendezvous
from polyrhythm.communication.transports.torch_distributed.link_words import newest_incarnations
from polyrhythm.launch.children.watch import Watch
from polyrhythm.roles.job import Losses
from polyrhythm.roles.world import StopWish
from polyrhythm.strategies.cast import cast_in_order

GUEST = Peer(1, 1)


def test_a_guest_and_a_successor_of_worker_0_that_come_at_once_know_of_each_other() -> None:
    """Whenever the guest looks who is there: if it does not find the successor, that one is told of the guest."""
    store = rendezvous.host_store()
    present: set[Peer] = set()
    found: list[dict[int, int]] = []

    def look() -> None:  # the guest comes at the last moment at which it may be heard of
        found.append(newest_incarnations(store, 3))
        present.add(GUEST)

    told: list[Collection[Peer]] = []

    def start(peer: Peer, guests: Collection[Peer], ledger: object) -> None:
        told.append(guests)

    job = replace(make_job("parameter_server", 2), losses=Losses(restarts=1))
    ranks = SimpleNamespace(job=job, cast=cast_in_order(2, 1), children=[], start=start)
    watch = Watch(ranks, StopWish(), mock.Mock(), mock.Mock())  # type: ignore[arg-type]
    watch._recovery.guests = SimpleNamespace(look=look, present=present)  # type: ignore[assignment]
    watch._recovery.succession.lose(Peer(0, 0), -10.0)
    watch._recovery.start_successors(store)
    assert found == [{0: 1}]
    assert told == [{GUEST}]
