from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import Action, ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime

ALPHA, BETA = 1e-4, 1e-9


class _CountingNetwork(ConstantNetwork):
    """Notes the size of every message, by its sender."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time, ALPHA, 1 / BETA)
        self.sizes: dict[int, list[int]] = {}

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        self.sizes.setdefault(source, []).append(nbytes)
        super().transfer(source, to, nbytes, sent, arrived)


def _reduce(tensors: list[Tensor]) -> tuple[_CountingNetwork, SimulatedCluster]:
    time = VirtualTime()
    network = _CountingNetwork(time)
    cluster = SimulatedCluster(time, network, len(tensors))

    def part(communicator: Communicator, tensor: Tensor) -> None:
        Direct().all_reduce(communicator, tensor, tag=1)

    for rank, tensor in enumerate(tensors):
        communicator = cluster.communicator(rank)
        time.spawn(f"{rank}", lambda communicator=communicator, tensor=tensor: part(communicator, tensor))
    time.run()
    return network, cluster


SIZES: list[Callable[[int], int]] = [
    lambda ranks: 0,
    lambda ranks: 1,
    lambda ranks: ranks - 1,
    lambda ranks: ranks,
    lambda ranks: ranks + 1,
    lambda ranks: 1000,
]


@pytest.mark.parametrize("ranks", range(1, 18))
def test_whole_numbers_are_added_exactly(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    for size in {size(ranks) for size in SIZES}:
        numbers = torch.randint(-1000, 1000, (ranks, size), generator=generator)
        tensors = list(numbers.float())
        network, cluster = _reduce(tensors)
        for tensor in tensors:
            assert torch.equal(tensor, numbers.sum(0).float())
        messages = [len(network.sizes.get(rank, [])) for rank in range(ranks)]
        assert messages == [2 * (ranks - 1)] * ranks
        payload = sum(map(sum, network.sizes.values())) - HEADER_BYTES * sum(messages)
        assert payload == 2 * (ranks - 1) * size * 4
        assert sum(rank.bytes_sent for rank in cluster.ranks) == payload + HEADER_BYTES * sum(messages)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 17])
def test_floats_are_added_in_rank_order_to_the_same_bits(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ranks, 1003, generator=generator) * 10 ** torch.randn(
        ranks, 1003, generator=generator
    )
    expected = values[0].clone()
    for rank in range(1, ranks):
        expected += values[rank]
    tensors = [value.clone() for value in values]
    _reduce(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_other_dtypes_and_shapes_are_kept(dtype: torch.dtype) -> None:
    tensors = [torch.full((3, 5), rank + 1, dtype=dtype) for rank in range(4)]
    _reduce(tensors)
    for tensor in tensors:
        assert tensor.shape == (3, 5)
        assert tensor.dtype is dtype
        assert torch.equal(tensor, torch.full((3, 5), 10, dtype=dtype))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_equal_slices_take_the_formulas_time(ranks: int) -> None:
    r"""Each of the two phases ends when the last of N-1 messages, sent one by one, is there.

    T = 2 (\alpha + (N-1) (M/N + H) \beta)
    """
    elements = 1200 * ranks
    network, cluster = _reduce([torch.ones(elements) for _ in range(ranks)])
    slice_bytes = elements * 4 // ranks + HEADER_BYTES
    assert all(set(sizes) == {slice_bytes} for sizes in network.sizes.values())
    assert cluster.time.now() == pytest.approx(2 * (ALPHA + (ranks - 1) * slice_bytes * BETA), rel=1e-12)


def test_each_rank_sends_its_share() -> None:
    ranks, elements = 4, 1200
    _, cluster = _reduce([torch.ones(elements) for _ in range(ranks)])
    share = 2 * elements * 4 * (ranks - 1) // ranks + 2 * (ranks - 1) * HEADER_BYTES
    assert [rank.bytes_sent for rank in cluster.ranks] == [share] * ranks
