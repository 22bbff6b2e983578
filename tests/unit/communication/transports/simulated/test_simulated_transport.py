from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.communicator_checks import CHECKS, SIZE, run
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES, Kind, Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork, Route
from polyrhythm.communication.transports.simulated.network import ConstantNetwork, Network
from polyrhythm.communication.transports.simulated.virtual_time import Deadlock, VirtualTime
from polyrhythm.errors import PeerLost

ALPHA, BANDWIDTH = 0.25, 1024.0


def _play(
    *parts: Callable[[Communicator], None], lose: tuple[float, int] | None = None, contended: bool = False
) -> SimulatedCluster:
    """Plays one function a rank to the end; `lose` tells when which rank is lost."""
    time, count = VirtualTime(), len(parts)
    network: Network = ConstantNetwork(time, ALPHA, BANDWIDTH)
    if contended:  # messages of a rank share its link
        network = ContendedNetwork(
            time, [BANDWIDTH] * 2 * count, lambda source, to: Route((source, count + to), ALPHA)
        )
    cluster = SimulatedCluster(time, network, count)
    for rank, part in enumerate(parts):
        time.spawn(f"rank {rank}", lambda rank=rank, part=part: part(cluster.communicator(rank)))
    if lose is not None:
        time.at(lose[0], lambda: cluster.lose(lose[1]))
    time.run()
    return cluster


def _idle(communicator: Communicator) -> None:
    """A rank that does nothing."""


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_simulated_ranks(check: Callable[[Communicator], None], contended: bool) -> None:
    ended: list[int] = []

    def part(communicator: Communicator) -> None:
        run(check, communicator)
        ended.append(communicator.rank)

    _play(*[part] * SIZE, contended=contended)
    assert sorted(ended) == list(range(SIZE))


def test_a_message_takes_its_time() -> None:
    payload = torch.zeros(240)  # 960 bytes and a header of 64 make 1 s

    def sender(communicator: Communicator) -> None:
        communicator.clock.sleep(2.0)
        communicator.send(1, Message(Kind.PUSH, payload))
        assert communicator.clock.now() == 3.0

    def receiver(communicator: Communicator) -> None:
        communicator.receive(0)
        assert communicator.clock.now() == 3.0 + ALPHA

    cluster = _play(sender, receiver)
    assert [rank.bytes_sent for rank in cluster.ranks] == [HEADER_BYTES + 960, 0]


def test_arrival_decides_who_is_first() -> None:
    def sender(delay: float) -> Callable[[Communicator], None]:
        def send(communicator: Communicator) -> None:
            communicator.clock.sleep(delay)
            communicator.send(0, Message(Kind.PUSH))

        return send

    def receiver(communicator: Communicator) -> None:
        assert [communicator.receive()[0] for _ in range(3)] == [3, 1, 2]

    _play(receiver, sender(2.0), sender(3.0), sender(1.0))


def test_a_rank_may_receive_twice_at_once() -> None:
    seen = []

    def receiver(communicator: Communicator) -> None:
        works = [communicator.start(lambda: communicator.receive(1)[1].version) for _ in range(2)]
        seen.extend(work.wait() for work in works)

    def sender(communicator: Communicator) -> None:
        for version in (1, 2):
            communicator.send(0, Message(Kind.PUSH, version=version))

    _play(receiver, sender)
    assert seen == [1, 2]


def test_waiting_for_what_never_comes_is_a_deadlock() -> None:
    with pytest.raises(Deadlock) as caught:
        _play(
            lambda communicator: communicator.receive(1), _idle, lambda communicator: communicator.receive()
        )
    text = "deadlock: rank 0 waits for a message from rank 1; rank 2 waits for a message from anyone"
    assert str(caught.value) == text


def test_receivers_hear_of_a_lost_peer() -> None:
    def one(communicator: Communicator) -> None:
        with pytest.raises(PeerLost, match="rank 1 is gone") as caught:
            communicator.receive(1)
        assert caught.value.rank == 1
        assert communicator.clock.now() == 5.0
        with pytest.raises(PeerLost):
            communicator.receive(1)
        communicator.clock.sleep(1.0)
        communicator.send(2, Message(Kind.PUSH, version=4))
        communicator.subgroup("rest", [0, 2]).send(1, Message(Kind.PUSH, version=5))

    def anyone(communicator: Communicator) -> None:
        with pytest.raises(PeerLost):
            communicator.receive()
        assert communicator.clock.now() == 5.0
        assert communicator.receive()[1].version == 4
        assert communicator.subgroup("rest", [0, 2]).receive()[1].version == 5

    _play(one, _idle, anyone, lose=(5.0, 1))


def test_who_polls_or_sends_hears_of_a_lost_peer() -> None:
    def survivor(communicator: Communicator) -> None:
        assert communicator.poll(1) is None
        communicator.clock.sleep(6.0)
        with pytest.raises(PeerLost):
            communicator.poll(1)
        with pytest.raises(PeerLost):
            communicator.poll()
        assert communicator.poll() is None
        with pytest.raises(PeerLost):
            communicator.send(1, Message(Kind.PUSH))
        with pytest.raises(PeerLost):
            communicator.all_reduce(torch.ones(2))

    _play(survivor, _idle, lose=(5.0, 1))


def test_what_a_lost_peer_sent_before_still_counts() -> None:
    def survivor(communicator: Communicator) -> None:
        communicator.clock.sleep(6.0)
        assert communicator.receive(1)[1].version == 3
        with pytest.raises(PeerLost):
            communicator.receive(1)

    _play(survivor, lambda communicator: communicator.send(0, Message(Kind.PUSH, version=3)), lose=(5.0, 1))


def test_an_overlapped_collective_hands_its_loss_to_who_waits() -> None:
    def survivor(communicator: Communicator) -> None:
        handle = communicator.start_all_reduce(torch.ones(4))
        communicator.clock.sleep(10.0)  # the loss comes while nobody waits for the handle
        assert handle.done()
        with pytest.raises(PeerLost):
            handle.wait()

    _play(survivor, _idle, lose=(5.0, 1))


def test_the_same_run_gives_the_same_times() -> None:
    def trace() -> list[tuple[float, int, int]]:
        seen = []

        def part(communicator: Communicator) -> None:
            for step in range(5):
                communicator.clock.sleep(0.1 * ((communicator.rank * 3 + step) % 4))
                tensor = torch.full((50,), float(communicator.rank))
                communicator.all_reduce(tensor)
                seen.append((communicator.clock.now(), communicator.rank, communicator.traffic.bytes_sent))

        _play(*[part] * 6)
        return seen

    first = trace()
    assert len(first) == 30
    assert trace() == first
