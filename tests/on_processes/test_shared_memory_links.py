"""Links through shared memory between real processes, of which some die."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import torch

from conformance.rank_processes import RankProcesses, Seat
from on_processes.greeting import SOON_S, greet_all, loss
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.shared_memory import links
from polyrhythm.communication.transports.shared_memory.links import OutgoingMemoryLink
from polyrhythm.communication.transports.shared_memory.meeting import host_key
from polyrhythm.communication.transports.tcp.outgoing_link import OutgoingTcpLink
from polyrhythm.errors import PeerLost

LARGE = 5_000_000  # elements; 20 MB


def _sockets() -> str:
    return Path("/proc/net/unix").read_text()


def _exchange_and_wait(seat: Seat) -> None:
    home, network = seat.connect()
    greet_all(network)
    network.send(1 - seat.rank, Message(Kind.PUSH, torch.ones(LARGE)))
    held = network.receive()[1]
    assert held.tensor is not None
    maps = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert home._links._memory is not None
    seat.tell((int(held.tensor.sum()), home._links._memory.card.address, {m for m in maps if "memfd" in m}))
    seat.wait_for_word()


def test_nothing_is_left_behind_when_all_are_killed() -> None:
    with RankProcesses(_exchange_and_wait, 2) as ranks:
        told = ranks.hear_all(range(2))
        for total, address, maps in told:
            assert total == LARGE
            assert f"@{address}" in _sockets()  # no file: it goes with its process
            assert maps == {"/memfd:polyrhythm (deleted)"}  # nor is the memory
        for rank in range(2):
            ranks.kill(rank)
        for _, address, _ in told:
            assert address not in _sockets()


def _flood(seat: Seat) -> None:
    """Rank 0 sends to rank 1, which is stopped, until nothing more goes, and goes on with rank 2."""
    links.MOST_SHARED_BYTES = 100 << 20
    home, network = seat.connect()
    greet_all(network)
    seat.tell("ready")
    if seat.rank == 1:
        network.receive(0, tag=99)
    if seat.rank == 2:
        assert network.receive(0)[1].version == 1
        network.send(0, Message(Kind.PULL, version=2))
        return home.close()
    seat.wait_for_word()
    large = torch.ones(LARGE)
    handles = [network.start_send(1, Message(Kind.PUSH, large)) for _ in range(10)]
    seat.tell([handle.done() for handle in handles])
    lost = loss(handles[-1].wait)
    seat.tell(
        (*lost, loss(lambda: network.send(1, Message(Kind.PULL)))[0], loss(lambda: network.receive(1))[0])
    )
    network.send(2, Message(Kind.PUSH, version=1))
    assert network.receive(2)[1].version == 2
    return home.close()


def test_a_receiver_that_is_killed_in_the_middle_of_messages_breaks_its_own_link_only() -> None:
    with RankProcesses(_flood, 3) as ranks:
        ranks.hear_all(range(3))
        ranks.signal(1, signal.SIGSTOP)
        ranks.say(0, "go")
        assert ranks.hear(0) == [True] * 5 + [False] * 5  # as many as there is memory for
        killed_at = ranks.kill(1)
        *lost, heard_at = [(fact := ranks.hear(0))[0], *fact[2:], fact[1]]
        assert lost == [1, 1, 1]
        assert heard_at - killed_at < SOON_S
        ranks.wait_for_end([0, 2])


def _die_in_the_middle(seat: Seat) -> None:
    links.MOST_SHARED_BYTES = 0  # all in chunks, so that there is a middle
    home, network = seat.connect()
    greet_all(network)
    if seat.rank == 1:
        network.send(0, Message(Kind.PUSH, torch.ones(1_000_000), version=1))
        seat.tell("begun")
        while True:
            network.send(0, Message(Kind.PUSH, torch.ones(LARGE), version=1))
    if seat.rank == 0:
        assert network.receive(1)[1].tensor.sum() == 1_000_000
        seat.wait_for_word()
        while True:
            try:
                assert network.receive(1)[1].tensor.sum() == LARGE  # whole or not at all
            except PeerLost as error:
                seat.tell((error.rank, time.monotonic()))
                break
        network.send(2, Message(Kind.PULL, version=5))
    if seat.rank == 2:
        assert network.receive(0)[1].version == 5
    home.close()


def test_half_a_message_of_a_killed_sender_is_not_delivered() -> None:
    with RankProcesses(_die_in_the_middle, 3) as ranks:
        assert ranks.hear(1) == "begun"
        killed_at = ranks.kill(1)
        ranks.say(0, "go")
        lost, heard_at = ranks.hear(0)
        assert lost == 1
        assert heard_at - killed_at < SOON_S
        ranks.wait_for_end([0, 2])


def _fork_and_wait(seat: Seat) -> None:
    _home, network = seat.connect()
    greet_all(network)
    if seat.rank == 1:
        held = network.receive(0)[1]
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            del held  # says nothing to the sender: the slot is the parent's
            os.write(writing, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(reading, 1)
        network.send(0, Message(Kind.PULL))
        assert held.tensor is not None
        network.receive(0)
        assert held.tensor.sum() == LARGE
        seat.tell(child)
        seat.wait_for_word()
    network.send(1, Message(Kind.PUSH, torch.ones(LARGE)))
    network.receive(1)
    network.send(1, Message(Kind.PUSH, torch.zeros(LARGE)))
    seat.tell("sent")
    seat.tell(loss(lambda: network.receive(1)))


def test_a_death_is_noticed_although_the_dead_left_children() -> None:
    with RankProcesses(_fork_and_wait, 2) as ranks:
        child = ranks.hear(1)
        try:
            assert ranks.hear(0) == "sent"
            killed_at = ranks.kill(1)
            lost, heard_at = ranks.hear(0)
            assert lost == 1
            assert heard_at - killed_at < SOON_S
        finally:
            os.kill(child, signal.SIGKILL)


def _without_memory(seat: Seat) -> None:
    def refuse(size: int) -> int:
        raise OSError("no memory files here")

    if seat.rank == 1:
        links.shared_file = refuse
    home, network = seat.connect()
    greet_all(network)
    kinds = {to: type(link) for to, link in home._links._outgoing.items()}
    network.barrier()
    home.close()
    seat.tell(kinds)


def test_ranks_that_cannot_share_memory_use_gloo_links() -> None:
    with RankProcesses(_without_memory, 3) as ranks:
        assert ranks.hear_all(range(3)) == [
            {1: OutgoingTcpLink, 2: OutgoingMemoryLink},
            {0: OutgoingTcpLink, 2: OutgoingTcpLink},
            {0: OutgoingMemoryLink, 1: OutgoingTcpLink},
        ]
        ranks.wait_for_end(range(3))


def _with_little_memory(seat: Seat) -> None:
    if seat.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # holds for files of memory too
    home, network = seat.connect()
    for size in (100_000, LARGE, 100_000):
        if seat.rank == 0:
            network.send(1, Message(Kind.PUSH, torch.arange(size, dtype=torch.float32)))
        else:
            received = network.receive(0)[1].tensor
            seat.tell(torch.equal(received, torch.arange(size, dtype=torch.float32)))
    home.close()


def test_too_little_memory_costs_speed_and_nothing_else() -> None:
    with RankProcesses(_with_little_memory, 2) as ranks:
        assert [ranks.hear(1) for _ in range(3)] == [True] * 3
        ranks.wait_for_end(range(2))


def _tell_host(seat: Seat, address: str) -> None:
    seat.tell(host_key(address))


def test_processes_of_one_host_know_it_and_addresses_tell_clones_apart() -> None:
    with RankProcesses(_tell_host, 2, "10.0.0.1") as ranks:
        assert ranks.hear_all(range(2)) == [host_key("10.0.0.1")] * 2
    assert host_key("10.0.0.1") != host_key("10.0.0.2")
