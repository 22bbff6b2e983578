"""Reunions over simulated links: the point by hand, and one that breaks when some have heard that all have it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.mixing.turns import GroupView, Progress


def play(workers: int, body: Callable[[int, Communicator], None]) -> None:
    """Lets workers do something, each as a rank of its own."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), workers)
    for rank in range(workers):
        network = cluster.communicator(rank)
        time.spawn(f"worker {rank}", lambda rank=rank, network=network: body(rank, network))  # type: ignore[misc]
    time.run()


class Breaking:
    """A communicator on which the n-th sum, and all after it, break for this rank once it has handed its part in."""

    def __init__(self, inner: Communicator, breaks_at: int) -> None:
        self._inner = inner
        self._left = breaks_at
        self.rank, self.size = inner.rank, inner.size

    def all_reduce(self, tensor: Tensor) -> None:
        self._left -= 1
        self._inner.all_reduce(tensor)
        if self._left <= 0:
            raise PeerLost(2, "adding up")


def test_a_point_that_some_have_taken_is_taken_by_all() -> None:
    """The sums are: what is told, the point, that all have it. The last breaks for worker 1, which has the point."""
    held = {0: torch.tensor([0.0]), 1: torch.tensor([4.0])}
    seen: list[float] = []

    def body(rank: int, network: Communicator) -> None:
        reunion = GroupView(held[rank].copy_)
        first = Breaking(network, 3 if rank == 1 else 9)
        try:
            reunion.exchange(first, Progress(steps=0), held[rank])  # type: ignore[arg-type]
            reunion.meet(first, held[rank].clone(), 1.0)  # type: ignore[arg-type]
        except PeerLost:
            seen.append(float(held[rank]))
        reunion.exchange(network.subgroup("again", range(2)), Progress(steps=0), held[rank])

    play(2, body)
    assert seen == [4.0]
    assert [held[rank].tolist() for rank in range(2)] == [[2.0], [2.0]]


def test_a_point_that_nobody_has_taken_is_forgotten() -> None:
    """The last sum breaks for both; what they hold is met about again, and counts once."""
    held = {0: torch.tensor([0.0]), 1: torch.tensor([4.0])}
    kept: list[float] = []

    def body(rank: int, network: Communicator) -> None:
        reunion = GroupView(held[rank].copy_)
        first, again = Breaking(network, 3), network.subgroup("again", range(2))
        try:
            reunion.exchange(first, Progress(steps=0), held[rank])  # type: ignore[arg-type]
            reunion.meet(first, held[rank].clone(), 1.0)  # type: ignore[arg-type]
        except PeerLost:
            reunion.exchange(again, Progress(steps=0), held[rank])
            kept.append(float(held[rank]))
            reunion.meet(again, held[rank].clone(), 1.0 + 2.0 * rank)

    play(2, body)
    assert sorted(kept) == [0.0, 4.0]
    assert [held[rank].tolist() for rank in range(2)] == [[1.0], [1.0]]  # 4 of a mass of 3, and nothing of 1
