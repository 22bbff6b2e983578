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
