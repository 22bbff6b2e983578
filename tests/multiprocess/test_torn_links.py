"""Connections between ranks that live are torn again and again: nobody is lost, and no message is lost or doubled."""

from __future__ import annotations

import socket
import threading
from random import Random

import torch

from conformance.rank_processes import RankProcesses, Seat
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.owned_socket import _open, hang_up
from polyrhythm.communication.transports.tcp.sockets import TcpSocket

RANKS, ROUNDS = 3, 60
SIZES = (0, 10, 1000, 40_000, 200_000)


def _tear(over: threading.Event, random: Random) -> None:
    """Resets some connection of this process every few milliseconds; those that listen stay."""
    while not over.wait(0.004 * random.random()):
        sockets = [each for each in list(_open) if isinstance(each, TcpSocket)]
        for connection in random.sample(sockets, min(1, len(sockets))):
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                hang_up(connection)


def _talk(seat: Seat) -> None:
    home, network = seat.connect()
    over = threading.Event()
    tearing = threading.Thread(target=_tear, args=(over, Random(seat.rank)))
    tearing.start()
    others = [rank for rank in range(network.size) if rank != network.rank]
    sizes = Random(7)
    for step in range(ROUNDS):
        vector = torch.full((sizes.choice(SIZES),), float(step))
        sending = [network.start_send(to, Message(Kind.VECTOR, vector, step=step)) for to in others]
        for source in others:
            _, message = network.receive(source)
            assert message.step == step
            assert torch.equal(message.tensor, vector)
        for handle in sending:
            handle.wait()
    over.set()
    tearing.join()
    assert all(network.poll(source) is None for source in others)
    home.close()
    seat.tell("left")


def test_torn_connections_are_mended() -> None:
    with RankProcesses(_talk, RANKS, shared_memory=False) as ranks:
        assert ranks.hear_all(range(RANKS)) == ["left"] * RANKS
        ranks.wait_for_end(range(RANKS))
