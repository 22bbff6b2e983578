"""Collectives over real processes: right, counted, and with the bits of the simulation."""

from __future__ import annotations

import hashlib

import pytest
import torch

from conformance.rank_processes import RankProcesses, Seat
from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.auto import Auto
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.cost.machine import Payload
from polyrhythm.specs import build
from unit.communication.collectives.groups import (
    SPECS,
    collective,
    fractions,
    reduced,
    sizes,
    uncontended,
    whole_numbers,
)

LONG = 100_003


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def _check(spec: str, network: Communicator) -> str:
    """Adds up whole numbers of all sizes; gives the digest of a sum of fractions."""
    ranks, rank = network.size, network.rank
    sums = AllReduce(collective(spec), network, spec)
    vectors = [whole_numbers(ranks, size) for size in sizes(ranks)]
    mine = [vector[rank].clone() for vector in vectors]
    before = network.traffic.bytes_sent
    for handle in [sums.start(tensor) for tensor in mine]:  # all under way at once
        handle.wait()
    sent = [collective(spec).sent(ranks, rank, Payload(tensor.numel(), 4)) for tensor in mine]
    counted = sum(each.nbytes + HEADER_BYTES * each.messages for each in sent)
    assert network.traffic.bytes_sent - before == counted
    for tensor, vector in zip(mine, vectors, strict=True):
        assert torch.equal(tensor, torch.stack(vector).sum(0))
    long = fractions(ranks, LONG)[rank].clone()
    sums.run(long)
    return _digest(long)


def _check_auto(network: Communicator) -> str:
    sums = AllReduce(Auto(), network, "auto")
    ready = sums.prepare()
    vector = whole_numbers(network.size, LONG)
    tensor = vector[network.rank].clone()
    sums.run(tensor)
    assert torch.equal(tensor, torch.stack(vector).sum(0))
    assert isinstance(ready, Auto)
    assert ready.latency_s is not None
    assert (
        0 < ready.latency_s + ready.overhead_s < 10
    )  # no more can be said of a machine that does other work as well
    return str(ready)


def _check_library(network: Communicator) -> str:
    library = build("collective", "library", COLLECTIVES)
    assert isinstance(library, Collective)
    vector = whole_numbers(network.size, 1000)
    tensor = vector[network.rank].clone()
    AllReduce(library, network).start(tensor).wait()
    assert torch.equal(tensor, torch.stack(vector).sum(0))
    return _digest(tensor)


def _check_all(seat: Seat) -> None:
    home, network = seat.connect()
    for spec in SPECS:
        seat.tell(_check(spec, network))
    seat.tell(_check_auto(network))
    seat.tell(_check_library(network))
    home.close()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_real_ranks_have_the_bits_of_simulated_ones(ranks: int) -> None:
    with RankProcesses(_check_all, ranks) as processes:
        for spec in SPECS:
            found = processes.hear_all(range(ranks))
            assert len(set(found)) == 1, spec
            virtual = reduced(uncontended(ranks), collective(spec), fractions(ranks, LONG))
            assert found[0] == _digest(virtual[0]), spec
        auto = processes.hear_all(range(ranks))
        assert auto == [auto[0]] * ranks  # the same figures, and so the same choice
        library = processes.hear_all(range(ranks))
        assert library == [library[0]] * ranks
        processes.wait_for_end(range(ranks))
