"""Connections between ranks that live are torn again and again: nobody is lost, and no message is lost or doubled."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from random import Random

import pytest
import torch

from conformance.jobs import blobs, make_job, simulated
from conformance.rank_processes import RankProcesses, Seat
from on_processes.two_hosts import two_hosts
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.sockets import TcpSocket, _open, hang_up
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.events import Event, RunEnded
from polyrhythm.launch.rank import RankContext, run_rank
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.role_assignment import roles_in_order

RANKS, ROUNDS, TEARS = 3, 60, 200
WORKERS, SERVERS = 2, 2
REPLICATED = "parameter_server(servers=2, replicas=2, consistency=synchronous)"
_PORT = 29403
_CLONE_NEWNET = 0x40000000
SIZES = (0, 10, 1000, 40_000, 200_000)


def _tear(over: threading.Event, random: Random) -> None:
    """Ends some connection of this process every few milliseconds.

    Not one that listens or is about to: nobody could reach this process any more. Not for ever: where processes wait
    for a core, connections might take longer to be made than to be torn.
    """
    torn = 0
    while torn < TEARS and not over.wait(0.02 * random.random()):
        sockets = [each for each in list(_open) if isinstance(each, TcpSocket)]
        for connection in random.sample(sockets, min(1, len(sockets))):
            with suppress(OSError):  # it is not connected, or has been closed meanwhile
                connection.getpeername()
                hang_up(connection)
                torn += 1


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


def _train(seat: Seat, hosts: list[str]) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{hosts[seat.rank % 2]}") as handle:
        assert library.setns(handle.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE=str(seat.size), MASTER_ADDR="10.78.0.1", MASTER_PORT=str(_PORT)
    )
    over = threading.Event()
    tearing = threading.Thread(target=_tear, args=(over, Random(seat.rank)))
    tearing.start()

    def tell(event: Event) -> None:
        if seat.rank == 0 and isinstance(event, RunEnded):
            seat.tell((event.outcome, event.result["parameters_sha256"]))

    roles = roles_in_order(WORKERS, SERVERS)
    run_rank(_job(), roles, from_environment(), 1, RankContext(StopRequest(), tell))
    over.set()
    tearing.join()


def _job() -> Job:
    return make_job(REPLICATED, WORKERS, dataset=blobs(train=240), epochs=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_servers_whose_connections_are_torn_keep_their_shards_and_every_update() -> None:
    """In lockstep nothing that is lost or doubled could leave the bits as they are."""
    with two_hosts() as hosts, RankProcesses(_train, WORKERS + SERVERS, hosts) as ranks:
        assert ranks.hear(0) == ("done", simulated(_job()).result["parameters_sha256"])
        ranks.wait_for_end(range(WORKERS + SERVERS))
