"""A link between two hosts whose cable is pulled and put back: what was under way arrives, in order and once."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from conformance.rank_processes import RankProcesses, Seat
from on_processes.two_hosts import ip, two_hosts
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

_CLONE_NEWNET = 0x40000000
_PORT = 29401
_NUMBERS, _MESSAGES = 200_000, 6


def _enter(namespace: str) -> None:
    """Moves this process, which has one thread, into a namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as handle:
        assert library.setns(handle.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _talk(seat: Seat, hosts: list[str]) -> None:
    _enter(hosts[seat.rank])
    os.environ.update(RANK=str(seat.rank), WORLD_SIZE="2", MASTER_ADDR="10.78.0.1", MASTER_PORT=str(_PORT))
    home, network = connect(from_environment())
    for turn in range(2):
        if seat.rank == 1:
            seat.wait_for_word()
            sending = [
                network.start_send(0, Message(Kind.PUSH, torch.full((_NUMBERS,), float(number)), step=turn))
                for number in range(_MESSAGES)
            ]
            seat.tell("under way")
            for handle in sending:
                handle.wait()
        else:
            heard = [network.receive(1)[1] for _ in range(_MESSAGES)]
            seat.tell([(message.step, message.tensor.unique().tolist()) for message in heard])
    network.barrier()
    home.close()
    seat.tell("left")


def test_what_is_sent_while_the_cable_is_out_arrives_when_it_is_back() -> None:
    with two_hosts() as hosts, RankProcesses(_talk, 2, hosts) as ranks:
        expected = [[(turn, [float(number)]) for number in range(_MESSAGES)] for turn in range(2)]
        ranks.say(1, "send")
        assert ranks.hear(1) == "under way"
        assert ranks.hear(0) == expected[0]
        ip("-n", hosts[0], "link", "set", "cable", "down")
        ranks.say(1, "send")
        assert ranks.hear(1) == "under way"
        assert '"operstate":"DOWN"' in ip("-n", hosts[0], "-j", "link", "show", "dev", "cable")
        ip("-n", hosts[0], "link", "set", "cable", "up")
        assert ranks.hear(0) == expected[1]
        assert ranks.hear_all(range(2)) == ["left", "left"]
        ranks.wait_for_end(range(2))
