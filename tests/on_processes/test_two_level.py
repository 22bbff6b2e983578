"""Ranks that share hosts in part: shared memory inside, TCP between; chosen by itself."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from conformance.rank_processes import RankProcesses, Seat
from on_processes.two_hosts import two_hosts
from polyrhythm.communication.transports.torch_distributed.communicator import (
    TorchDistributedCommunicator,
    connect,
)
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.communication.transports.two_level import TwoLevelCollectives
from polyrhythm.errors import PeerLost

_CLONE_NEWNET = 0x40000000
_PORT = 29400  # nothing else listens in a namespace that was just made


def join(seat: Seat, namespaces: list[str]) -> tuple[Rank, TorchDistributedCommunicator]:
    """Moves this process, which has one thread, into its namespace: ranks 0 and 1 into the first."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespaces[0 if seat.rank < 2 else 1]}") as handle:
        assert library.setns(handle.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE=str(seat.size), MASTER_ADDR="10.78.0.1", MASTER_PORT=str(_PORT)
    )
    return connect(from_environment())


def add_up(seat: Seat, namespaces: list[str]) -> None:
    torch.set_num_threads(1)
    home, network = join(seat, namespaces)
    facts = []
    for dtype, count in (
        (torch.float32, 1),
        (torch.float64, 1000),
        (torch.float32, 700_001),
        (torch.int64, 5),
    ):
        own = torch.arange(count, dtype=dtype) * (seat.rank + 1)
        network.all_reduce(own)
        facts.append(torch.equal(own, torch.arange(count, dtype=dtype) * sum(range(1, seat.size + 1))))
    square = torch.full((3, 4), float(seat.rank)).t()
    handles = [network.start_all_reduce(part) for part in (square, torch.ones(7))]
    handles[1].wait()
    handles[0].wait()
    facts.append(torch.equal(square, torch.full((4, 3), float(sum(range(seat.size))))))
    for root in range(seat.size):
        word = torch.full((9,), float(seat.rank))
        network.broadcast(word, root)
        facts.append(word.tolist() == [float(root)] * 9)
    network.barrier()
    facts.append(isinstance(network.collectives(), TwoLevelCollectives))
    # the leaders' sums of hosts are added up, and that is what everyone has, to the bit
    bits = torch.randn(10_000, generator=torch.Generator().manual_seed(seat.rank))
    network.all_reduce(bits)
    seat.tell((facts, bits.numpy().tobytes()))
    network.barrier()
    home.close()


def wait_in_vain(seat: Seat, namespaces: list[str]) -> None:
    torch.set_num_threads(1)
    _, network = join(seat, namespaces)
    network.barrier()
    seat.tell("ready")
    if seat.rank == seat.size - 1:
        seat.wait_for_word()  # and dies
    with pytest.raises(PeerLost):
        network.all_reduce(torch.ones(100))
    seat.tell("noticed")
    seat.wait_for_word()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
@pytest.mark.parametrize("size", [3, 4])
def test_two_hosts_add_up_and_hand_out(size: int) -> None:
    with two_hosts() as namespaces, RankProcesses(add_up, size, namespaces) as ranks:
        told = [ranks.hear(rank) for rank in range(size)]
        ranks.wait_for_end(range(size))
    assert all(all(facts) for facts, _ in told), told
    assert len({bits for _, bits in told}) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_a_dead_rank_of_one_host_is_noticed_on_all_others() -> None:
    with two_hosts() as namespaces, RankProcesses(wait_in_vain, 4, namespaces) as ranks:
        assert [ranks.hear(rank) for rank in range(4)] == ["ready"] * 4
        ranks.kill(3)
        assert [ranks.hear(rank) for rank in range(3)] == ["noticed"] * 3
