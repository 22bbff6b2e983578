"""What a communicator that is timed adds up, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyrhythm.communication.activity import Blocked
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.forwarding import TimedCommunicator
from polyrhythm.communication.message import HEADER_BYTES, Kind, Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PeerLost

LATENCY_S, BANDWIDTH = 0.125, 1e3
MESSAGE = Message(Kind.PUSH, torch.zeros(250))
TRANSFER_S = (HEADER_BYTES + 1000) / BANDWIDTH

Act = Callable[[Communicator, Blocked], None]


def blocked_of(*acts: Act) -> list[Blocked]:
    """Lets ranks act; gives what each was blocked."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, LATENCY_S, BANDWIDTH), len(acts))
    found = [Blocked(time) for _ in acts]
    for rank, act in enumerate(acts):
        network = TimedCommunicator(cluster.communicator(rank), found[rank])
        time.spawn(
            f"rank {rank}",
            lambda act=act, network=network, rank=rank: act(network, found[rank]),
            owner=cluster.ranks[rank],
        )
    time.run()
    return found


def test_sending_and_receiving_block_for_as_long_as_they_take() -> None:
    def send(network: Communicator, blocked: Blocked) -> None:
        network.clock.sleep(2.0)
        network.send(1, MESSAGE)

    def receive(network: Communicator, blocked: Blocked) -> None:
        blocked.spans = []
        network.clock.sleep(0.5)
        network.receive(0)
        network.clock.sleep(1.0)

    sender, receiver = blocked_of(send, receive)
    assert sender.seconds == pytest.approx(TRANSFER_S)
    assert receiver.seconds == pytest.approx(1.5 + TRANSFER_S + LATENCY_S)
    assert receiver.spans == [("receive", 0.5, pytest.approx(2.0 + TRANSFER_S + LATENCY_S))]


def test_what_computing_hides_is_not_blocked() -> None:
    """A transfer under way for 1.064 s, of which the last 0.064 s are waited for."""

    def send(network: Communicator, blocked: Blocked) -> None:
        handle = network.start_send(1, MESSAGE)
        assert not handle.done()
        network.clock.sleep(1.0)
        handle.wait()
        assert handle.done()

    def nothing(network: Communicator, blocked: Blocked) -> None:
        network.receive(0)

    sender, _ = blocked_of(send, nothing)
    assert sender.seconds == pytest.approx(TRANSFER_S - 1.0)


def test_the_background_blocks_only_who_waits_for_it() -> None:
    def send(network: Communicator, blocked: Blocked) -> None:
        group = network.subgroup("pair", (0, 1))
        handle = group.start(lambda: [group.send(1, MESSAGE) for _ in range(3)])
        network.clock.sleep(2.0)
        assert blocked.seconds == 0.0
        handle.wait()

    def receive(network: Communicator, blocked: Blocked) -> None:
        group = network.subgroup("pair", (0, 1))
        for _ in range(3):
            group.receive(0)

    sender, receiver = blocked_of(send, receive)
    assert sender.seconds == pytest.approx(3 * TRANSFER_S - 2.0)
    assert receiver.seconds == pytest.approx(3 * TRANSFER_S + LATENCY_S)


def test_collectives_count_in_subgroups_too_and_a_poll_takes_no_time() -> None:
    over_s = {}

    def meet(network: Communicator, blocked: Blocked) -> None:
        assert network.poll() is None
        network.clock.sleep(float(network.rank))
        group = network.subgroup("both", (0, 1))
        group.barrier()
        group.all_reduce(torch.ones(4))
        group.broadcast(torch.ones(4))
        over_s[network.rank] = network.clock.now()

    first, second = blocked_of(meet, meet)
    assert first.seconds == pytest.approx(over_s[0])
    assert second.seconds == pytest.approx(over_s[1] - 1.0)
    assert min(over_s.values()) > 1.0


def test_a_loss_ends_what_is_counted() -> None:
    blocked = Blocked(VirtualTime())
    with pytest.raises(PeerLost), blocked.by("receive"):
        raise PeerLost(1, "receiving")
    blocked.spans = []
    with blocked.by("send"), blocked.by("receive"):
        pass
    assert blocked.spans == [("send", 0.0, 0.0)]
