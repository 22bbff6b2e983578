"""Two hosts, as far as the network can tell: namespaces with nothing between them but one cable."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch

from conformance.rank_processes import RankProcesses, Seat
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.errors import PeerLost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

_CLONE_NEWNET = 0x40000000
_PORT = 29400  # nothing else listens in a namespace that was just made
_PAYLOAD_BYTES = 1_000_000


@dataclass(frozen=True)
class _Host:
    """A namespace and its end of the cable."""

    namespace: str
    interface: str
    address: str


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def hosts() -> Iterator[list[_Host]]:
    """Two hosts joined by a cable."""
    number = os.getpid()
    pair = [_Host(f"polyrhythm-{number}-{side}", f"pr{number}{side}", f"10.77.0.{side}") for side in (1, 2)]
    try:
        for host in pair:
            _ip("netns", "add", host.namespace)
        near, far = pair
        _ip("link", "add", near.interface, "type", "veth", "peer", "name", far.interface)
        for host in pair:
            _ip("link", "set", host.interface, "netns", host.namespace)
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
        yield pair
    finally:
        for host in pair:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.namespace)  # takes the cable with it
            with suppress(subprocess.CalledProcessError):
                _ip("link", "delete", host.interface)


def _received_bytes(host: _Host) -> int:
    found = json.loads(_ip("-n", host.namespace, "-s", "-j", "link", "show", "dev", host.interface))
    return int(found[0]["stats64"]["rx"]["bytes"])


def _enter(namespace: str) -> None:
    """Moves this process, which has one thread, into a namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as handle:
        assert library.setns(handle.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _meet(seat: Seat, hosts: list[_Host]) -> None:
    _enter(hosts[seat.rank].namespace)
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE="2", MASTER_ADDR=hosts[0].address, MASTER_PORT=str(_PORT)
    )
    rendezvous = from_environment()
    assert rendezvous.address == hosts[seat.rank].address
    home, network = connect(rendezvous)
    other = 1 - seat.rank
    handle = network.start_send(
        other, Message(Kind.PUSH, torch.full((_PAYLOAD_BYTES,), seat.rank).to(torch.uint8))
    )
    _, message = network.receive(other)
    handle.wait()
    assert message.tensor is not None
    assert torch.equal(message.tensor, torch.full((_PAYLOAD_BYTES,), other).to(torch.uint8))
    total = torch.full((1000,), float(seat.rank + 1))
    network.all_reduce(total)
    assert torch.equal(total, torch.full((1000,), 3.0))
    home.close()


def test_ranks_of_two_hosts_meet_over_the_cable_between_them(hosts: list[_Host]) -> None:
    before = [_received_bytes(host) for host in hosts]
    with RankProcesses(_meet, 2, hosts) as ranks:
        ranks.wait_for_end(range(2))
    for host, at_first in zip(hosts, before, strict=True):
        assert _received_bytes(host) - at_first > _PAYLOAD_BYTES


def _add_up_with_a_host_that_is_cut_off(seat: Seat, hosts: list[_Host]) -> None:
    _enter(hosts[seat.rank].namespace)
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE="2", MASTER_ADDR=hosts[0].address, MASTER_PORT=str(_PORT)
    )
    home, network = connect(from_environment())
    home.patience_s = 1.0
    network.all_reduce(torch.ones(1))
    seat.tell("together")
    seat.wait_for_word()
    try:
        network.all_reduce(torch.ones(_PAYLOAD_BYTES))
    except PeerLost as loss:
        seat.tell((loss.rank, home.clock.now()))
    seat.wait_for_word()


def test_a_sum_that_waits_for_a_host_that_is_cut_off_ends_without_a_watchdog(hosts: list[_Host]) -> None:
    with RankProcesses(_add_up_with_a_host_that_is_cut_off, 2, hosts) as ranks:
        assert [ranks.hear(rank) for rank in range(2)] == ["together"] * 2
        _ip("-n", hosts[1].namespace, "link", "set", hosts[1].interface, "down")
        for rank in range(2):
            ranks.say(rank, "add up")
        assert [ranks.hear(rank)[0] for rank in range(2)] == [1, 0]
