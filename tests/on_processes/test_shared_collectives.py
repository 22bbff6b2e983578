"""Collectives through shared memory, over real processes: their bits, their limits, and the death of a member."""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance.rank_processes import RankProcesses, Seat
from on_processes.greeting import SOON_S
from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.transports.between_hosts.collectives import HostCollectives
from polyrhythm.communication.transports.shared_memory.collectives import SharedMemoryCollectives
from polyrhythm.communication.transports.torch_distributed import collectives as rank_collectives
from polyrhythm.communication.transports.torch_distributed.communicator import TorchDistributedCommunicator
from polyrhythm.errors import PeerLost, RequestError

LARGE = 1_600_001
"""Elements of a vector that is larger than the arena of two."""


def _floats(rank: int, size: int) -> Tensor:
    """Gives floats whose sum depends on the order of adding."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, generator=generator) * 10 ** torch.randn(size, generator=generator)


def _shared(network: TorchDistributedCommunicator) -> SharedMemoryCollectives:
    network.barrier()
    collectives = network.collectives()
    assert isinstance(collectives, SharedMemoryCollectives)
    return collectives


def _add_up_everything(seat: Seat) -> None:
    home, network = seat.connect()
    sums = []
    larger_than_the_arena = [LARGE] if seat.size == 2 else []
    for size in (0, 1, seat.size - 1, seat.size, 1000, 300_007, *larger_than_the_arena):
        mine = _floats(seat.rank, size)
        by_messages = mine.clone()
        Direct().all_reduce(network, by_messages, tag=size)
        network.all_reduce(mine)
        assert torch.equal(mine, by_messages), size
        sums.append(sha256(mine.numpy().tobytes()).hexdigest())
        whole = torch.arange(size) * (seat.rank + 1)
        network.all_reduce(whole)
        assert torch.equal(whole, torch.arange(size) * (seat.size * (seat.size + 1) // 2))
        sent = torch.full((size,), seat.rank, dtype=torch.int32)
        network.broadcast(sent, seat.size - 1)
        assert torch.equal(sent, torch.full((size,), seat.size - 1, dtype=torch.int32))
    _shared(network)
    seat.tell(sums)
    home.close()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sums_are_exact_and_have_the_bits_of_direct_messages(ranks: int) -> None:
    with RankProcesses(_add_up_everything, ranks) as processes:
        first, *others = processes.hear_all(range(ranks))
        assert others == [first] * (ranks - 1)
        processes.wait_for_end(range(ranks))


def _start_several(seat: Seat) -> None:
    home, network = seat.connect()
    vectors = [torch.full((size,), float(seat.rank + size % 5)) for size in (10, LARGE, 0, 500_000, 3)]
    handles = [network.start_all_reduce(vector) for vector in vectors]
    if seat.rank == 1:  # waits for one of the middle, and for none that came before
        handles[3].wait()
    if seat.rank == 0:
        for handle in reversed(handles):
            handle.wait()
    if seat.rank == 2:  # waits for none: others must not depend on it
        while not all(handle.done() for handle in handles):
            network.clock.sleep(1e-3)
    network.barrier()
    strided = torch.arange(12.0).view(3, 4).t()
    network.all_reduce(strided)
    seat.tell(([vector.unique().tolist() for vector in vectors], strided.t().tolist()))
    home.close()


def test_several_are_under_way_at_once() -> None:
    with RankProcesses(_start_several, 3) as processes:
        sums = [[3.0], [3.0 + 3 * (LARGE % 5)], [], [3.0], [12.0]]
        strided = (torch.arange(12.0).view(3, 4) * 3).tolist()
        assert processes.hear_all(range(3)) == [(sums, strided)] * 3
        processes.wait_for_end(range(3))


def _disagree(seat: Seat) -> None:
    home, network = seat.connect()
    mine = torch.ones(10, dtype=torch.float64 if seat.rank == 1 else torch.float32)
    handle = network.start_all_reduce(mine)
    with pytest.raises(RequestError) as caught:
        handle.wait()
    seat.tell(str(caught.value))
    total = torch.ones(10)
    network.all_reduce(total)
    assert total.tolist() == [3.0] * 10
    home.close()


def test_mixed_dtypes_are_a_request_that_all_refuse() -> None:
    said = (
        "rank 0 called all_reduce with 10 elements of float32, rank 1 all_reduce with 10 elements of float64: call "
        "the same collective with the same dtype and size on all ranks"
    )
    with RankProcesses(_disagree, 3) as processes:
        assert processes.hear_all(range(3)) == [said] * 3
        processes.wait_for_end(range(3))


def _files_with_names() -> set[str]:
    """Gives what this process has open or mapped of the folder of shared memory, and has not unlinked."""
    mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    opened = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return {name for name in (*mapped, *opened) if name.startswith("/dev/shm") and "(deleted)" not in name}


def _add_up_for_ever(seat: Seat, spread: bool) -> None:
    _home, network = seat.connect()
    _shared(network)
    seat.tell(_files_with_names())

    def add_up_for_ever() -> None:
        while True:
            sizes = [LARGE // 3] * 3 if spread else [LARGE]
            handles = [network.start_all_reduce(torch.ones(size)) for size in sizes]
            handles[-1].wait()

    with pytest.raises(PeerLost) as caught:
        add_up_for_ever()
    seat.tell((caught.value.rank, time.monotonic()))
    with pytest.raises(PeerLost, match="rank"):
        network.barrier()
    survivors = network.subgroup("survivors", [0, 1, 3])
    total = torch.ones(3)
    survivors.all_reduce(total)
    assert total.tolist() == [3.0] * 3
    seat.tell("survived")
    seat.wait_for_word()


@pytest.mark.parametrize("spread", [False, True], ids=["one by one", "several"])
def test_a_rank_killed_inside_is_missed_by_all(spread: bool) -> None:
    with RankProcesses(_add_up_for_ever, 4, spread) as processes:
        assert processes.hear_all(range(4)) == [set()] * 4  # so nothing is left behind
        killed_at = processes.kill(2)
        for lost, heard_at in processes.hear_all([0, 1, 3]):
            assert lost == 2
            assert heard_at - killed_at < SOON_S
        assert processes.hear_all([0, 1, 3]) == ["survived"] * 3


def _wait_in_a_barrier(seat: Seat) -> None:
    _home, network = seat.connect()
    _shared(network)
    if seat.rank == 1:
        seat.tell("ready")
        seat.wait_for_word()
    seat.tell("waiting")
    with pytest.raises(PeerLost) as caught:
        network.barrier()
    seat.tell((caught.value.rank, time.monotonic()))


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_barrier_misses_who_dies_before_it(stopped: bool) -> None:
    with RankProcesses(_wait_in_a_barrier, 3) as processes:
        processes.hear(1)
        assert processes.hear_all([0, 2]) == ["waiting"] * 2
        if stopped:
            processes.signal(1, signal.SIGSTOP)
        killed_at = processes.kill(1)
        for lost, heard_at in processes.hear_all([0, 2]):
            assert lost == 1
            assert heard_at - killed_at < SOON_S


def _leave_while_others_add_up(seat: Seat) -> None:
    home, network = seat.connect()
    _shared(network)
    if seat.rank == 1:
        home.collectives.close()  # as `home.close` does, without waiting for the others
        seat.tell("left")
        seat.wait_for_word()
        return
    with pytest.raises(PeerLost, match="rank 1 has left") as caught:
        network.all_reduce(torch.ones(10))
    seat.tell(caught.value.rank)


def test_who_leaves_is_not_waited_for() -> None:
    with RankProcesses(_leave_while_others_add_up, 3) as processes:
        assert processes.hear(1) == "left"
        assert processes.hear_all([0, 2]) == [1, 1]


def _have_too_little(seat: Seat, needy: int) -> None:
    warnings: list[str] = []
    if seat.rank == needy:  # of files, those in memory included
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("polyrhythm.communication.transports.shared_memory.meeting").addHandler(handler)
    home, network = seat.connect()
    total = torch.ones(300_000)
    network.all_reduce(total)
    assert torch.equal(total, torch.full((300_000,), 3.0))
    seat.tell((isinstance(network.collectives(), HostCollectives), warnings))
    home.close()


def test_too_little_memory_means_tcp_and_one_warning() -> None:
    with RankProcesses(_have_too_little, 3, 0) as processes:
        (leads, said), *others = processes.hear_all(range(3))
        assert leads
        assert said == [
            "no shared memory between the ranks of this host, TCP instead (rank 0: 8 MiB cannot be allocated: "
            "File too large)"
        ]
        assert others == [(True, [])] * 2
        processes.wait_for_end(range(3))


def _do_without(seat: Seat) -> None:
    home, network = seat.connect()
    total = torch.ones(3)
    network.all_reduce(total)
    network.broadcast(total, 2)
    network.barrier()
    assert total.tolist() == [3.0] * 3
    seat.tell(type(network.collectives()).__name__)
    home.close()


def test_ranks_that_are_told_not_to_share_use_tcp() -> None:
    with RankProcesses(_do_without, 3, shared_memory=False) as processes:
        assert processes.hear_all(range(3)) == ["HostCollectives"] * 3
        processes.wait_for_end(range(3))


def _have_too_many_hosts(seat: Seat) -> None:
    rank_collectives._MOST_HOSTS = 2  # of this process alone
    _, network = seat.connect()
    total = torch.ones(100_000)
    network.all_reduce(total)
    network.broadcast(total, 2)
    assert torch.equal(total, torch.full((100_000,), 3.0))
    seat.tell(type(network.collectives()).__name__)
    if seat.rank == 2:
        seat.wait_for_word()  # and dies
    with pytest.raises(PeerLost):
        network.all_reduce(total)
    seat.tell("noticed")
    seat.wait_for_word()


def test_more_hosts_than_talk_each_with_all_use_gloo() -> None:
    with RankProcesses(_have_too_many_hosts, 3, shared_memory=False) as processes:
        assert processes.hear_all(range(3)) == ["GlooCollectives"] * 3
        processes.kill(2)
        assert [processes.hear(rank) for rank in (0, 1)] == ["noticed"] * 2
