"""A rank that sends what no rank of ours sends is lost; the others go on."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from conformance.rank_processes import RankProcesses, Seat
from on_processes.greeting import greet_all, loss
from polyrhythm.communication.message import HEADER_BYTES, Kind, Message, encode_header
from polyrhythm.communication.transports.shared_memory import links
from polyrhythm.communication.transports.tcp import outgoing_link as send_handle


@pytest.fixture(params=[True, False], ids=["memory", "tcp"], scope="module")
def shared_memory(request: pytest.FixtureRequest) -> bool:
    """Whether links between ranks go through shared memory."""
    return bool(request.param)


def _speak_gibberish(seat: Seat, forge: Callable[[Message, int], bytes]) -> None:
    home, network = seat.connect()
    greet_all(network)
    if seat.rank == 3:
        (links if seat.shared_memory else send_handle).encode_header = forge
        handle = network.start_send(0, Message(Kind.PUSH, torch.ones(10)))
        seat.tell("forged")
        seat.tell(loss(lambda: network.receive(0))[0])
        del handle
        return
    if seat.rank == 0:
        assert loss(lambda: network.receive(3))[0] == 3
        assert loss(network.receive)[0] == 3
        for other in (1, 2):
            network.send(other, Message(Kind.PUSH, version=other))
        assert {network.receive()[0], network.receive()[0]} == {1, 2}
    else:
        assert network.receive(0)[1].version == seat.rank
        network.send(0, Message(Kind.PUSH))
    network.subgroup("sane", [0, 1, 2]).barrier()
    home.close()


def _noise(message: Message, context: int) -> bytes:
    return random.Random(1).randbytes(HEADER_BYTES)


def _far_too_much(message: Message, context: int) -> bytes:
    header = bytearray(encode_header(message, context))
    header[16:24] = (2**62).to_bytes(8, "little")
    return bytes(header)


@pytest.mark.parametrize("forge", [_noise, _far_too_much])
def test_gibberish_costs_only_its_sender(shared_memory: bool, forge: Callable[[Message, int], bytes]) -> None:
    with RankProcesses(_speak_gibberish, 4, forge, shared_memory=shared_memory) as ranks:
        assert ranks.hear(3) == "forged"
        assert ranks.hear(3) == 0  # its listener has hung up
        ranks.wait_for_end(range(3))
