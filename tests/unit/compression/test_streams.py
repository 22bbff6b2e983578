"""Streams: sums of sparse vectors on every route are those of dense ones, whatever overlaps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.communication.message import HEADER_BYTES, MalformedMessage
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.compression.compressor import COMPRESSORS
from polyrhythm.compression.streams import Stream, port_bytes, route_of
from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.strategies.compressed_mean import CompressedMean
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters

NUMBERS, ROWS, COLUMNS, BIAS = 40, 24, 20, 7


def stream(indices: list[int], seed: int = 0, size: int = NUMBERS) -> Stream:
    values = torch.randn(len(indices), generator=torch.Generator().manual_seed(seed))
    return Stream(size, values, torch.tensor(indices, dtype=torch.int64))


PATTERNS = {
    "the same one": ([3], [3]),
    "nothing in common": ([0, 5, 9], [1, 6, 39]),
    "everything": ([3, 4, 20], [3, 4, 20]),
    "some": ([0, 4, 20, 39], [4, 5, 39]),
    "one empty": ([], [2, 3]),
    "both empty": ([], []),
    "all": (list(range(40)), [7]),
    "beyond the switch": (list(range(22)), list(range(10, 32))),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_merging_is_adding_either_way_round(name: str) -> None:
    first, second = (stream(indices, seed) for seed, indices in enumerate(PATTERNS[name]))
    merged, turned = first.merged(second), second.merged(first)
    assert torch.equal(merged.dense(), first.dense() + second.dense())
    assert torch.equal(merged.dense(), turned.dense())
    union = {*PATTERNS[name][0], *PATTERNS[name][1]}
    assert (merged.indices is None) == (len(union) > NUMBERS // 2)  # delta = n v / (4 + v)
    if merged.indices is not None:
        assert merged.indices.tolist() == sorted(union)
    for each in (first, merged):
        payload = each.encode()
        assert payload.dtype is torch.uint8
        assert payload.numel() <= 4 + 4 * NUMBERS or each is first
        assert torch.equal(each.decoded(payload).dense(), each.dense())
        for bad in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:2]):
            with pytest.raises(MalformedMessage):
                each.decoded(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_long_streams_are_merged_to_the_bit(dtype: torch.dtype) -> None:
    size, generator = 100_000, torch.Generator().manual_seed(0)
    made = []
    for count in (5000, 3000):
        indices = torch.randperm(size, generator=generator)[:count].sort().values
        made.append(Stream(size, torch.randn(count, generator=generator).to(dtype), indices))
    made[0].values[:4] = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan")], dtype=dtype)
    first, second = made
    merged = first.merged(second)
    assert merged.indices is not None
    assert first.indices is not None
    assert second.indices is not None
    expected = dict(zip(first.indices.tolist(), first.values, strict=True))
    for index, value in zip(second.indices.tolist(), second.values, strict=True):
        expected[index] = expected[index] + value if index in expected else value
    assert merged.indices.tolist() == sorted(expected)
    assert len(expected) < 8000
    values = torch.stack([expected[index] for index in sorted(expected)])
    assert torch.equal(merged.values.view(torch.uint8), values.view(torch.uint8))
    assert merged.values.dtype is dtype


@pytest.mark.parametrize("cut", [0, 1, 20, 39, 40])
def test_parts_are_slices(cut: int) -> None:
    whole = stream(PATTERNS["some"][0])
    both = torch.cat([whole.part(0, cut).dense(), whole.part(cut, NUMBERS).dense()])
    assert torch.equal(both, whole.dense())
    dense = whole.merged(stream(list(range(30)), 1))
    assert dense.indices is None
    assert torch.equal(dense.part(5, cut).dense() if cut > 5 else dense.dense()[:0], dense.dense()[5:cut])


class Members:
    """Members of a group in virtual time with a top-k of their gradients."""

    def __init__(self, count: int, spec: str) -> None:
        self.time = VirtualTime()
        self.cluster = SimulatedCluster(self.time, ConstantNetwork(self.time), count)
        made = build("compressor", spec, COMPRESSORS)
        self.flats = [
            FlatParameters(
                nn.ParameterList([torch.zeros(ROWS, COLUMNS), torch.zeros(BIAS), torch.zeros(9, COLUMNS)])
            )
            for _ in range(count)
        ]
        self.groups = [self.cluster.communicator(rank) for rank in range(count)]
        self.means = [
            CompressedMean(group, flat, made)  # type: ignore[arg-type]
            for group, flat in zip(self.groups, self.flats, strict=True)
        ]
        self.sent = [0] * count

    def step(self, gradients: list[Tensor], number: int = 0, weights: list[float] | None = None) -> Tensor:
        """Averages once; gives what all found."""

        def play(rank: int) -> None:
            mean, flat = self.means[rank], self.flats[rank]
            mean.prepare()
            flat.gradients.copy_(gradients[rank])
            before = self.groups[rank].traffic.bytes_sent
            mean.finish(Step(number, 1.0 if weights is None else weights[rank]))
            self.sent[rank] = self.groups[rank].traffic.bytes_sent - before

        for rank in range(len(self.flats)):
            self.time.spawn(f"member {rank}", lambda rank=rank: play(rank))  # type: ignore[misc]
        self.time.run()
        found = [flat.gradients.clone() for flat in self.flats]
        assert all(torch.equal(found[0], other) for other in found)
        return found[0]


SIZE = ROWS * COLUMNS + BIAS + 9 * COLUMNS


def random(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("route", "count", "per", "density"),
    [
        *product(["doubling", "split"], [3, 4, 5], ["layer"], [0.02, 0.3, 1.0]),
        ("doubling", 6, "whole", 0.1),
        ("split", 8, "whole", 0.1),
    ],
)
def test_every_route_finds_what_gathering_finds(route: str, count: int, per: str, density: float) -> None:
    keys = f"density={density}, dense_below=0, per={per}"
    gathered, routed = (Members(count, f"top_k({keys}, route={way})") for way in ("gathered", route))
    for number in range(3):
        gradients = [random(10 * number + rank) for rank in range(count)]
        weights = [1.0 + rank / 4 for rank in range(count)]
        one, other = (members.step(gradients, number, weights) for members in (gathered, routed))
        if route == "split":  # the same order of ranks; what travels as it is may be added up in another
            assert torch.equal(one[: ROWS * COLUMNS], other[: ROWS * COLUMNS])
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for rank in range(count):
        kept = [members.means[rank].state()[0]["own.residual"] for members in (gathered, routed)]
        assert torch.equal(*kept)


@pytest.mark.parametrize("route", ["doubling", "split"])
def test_a_gradient_that_is_not_finite_leaves_the_step_out(route: str) -> None:
    members = Members(4, f"top_k(density=0.1, dense_below=0, route={route})")
    members.step([random(rank) for rank in range(4)])
    before = members.means[2].state()[0]["own.residual"].clone()
    bad = [random(rank) for rank in range(4)]
    bad[1][3] = float("nan")
    assert not bool(members.step(bad, 1).any())
    assert torch.equal(members.means[2].state()[0]["own.residual"], before)


def test_streams_that_overlap_move_less_and_none_more_than_the_formula() -> None:
    count, entries = 8, round(0.05 * ROWS * COLUMNS) + round(0.05 * 9 * COLUMNS)
    for route in ("doubling", "split"):
        sent = []
        for apart in (True, False):
            members = Members(count, f"top_k(density=0.05, dense_below=0, route={route})")
            members.step([random(rank if apart else 0) for rank in range(count)])
            sent.append(sum(members.sent))
        messages = count * (3 if route == "doubling" else 2 * (count - 1))
        rest = (
            2 * (count - 1) * (4 * (BIAS + 3) + count * HEADER_BYTES)
        )  # what travels as it is, and the tail
        most = count * port_bytes(route, count, 8 * entries, 4 * SIZE) + messages * (HEADER_BYTES + 4) + rest
        assert sent[1] < sent[0] <= most


def test_the_route_follows_from_the_size() -> None:
    whole = 4e6

    def chosen(ranks: int, density: float) -> str:
        return route_of("auto", ranks, 2 * density * whole, whole)

    assert chosen(4, 0.01) == "gathered"
    assert chosen(16, 0.001) == "doubling"
    assert chosen(64, 0.01) == "split"  # 64 unions of 1 % fill in
    assert chosen(4, 0.3) == "split"
    assert route_of("doubling", 2, 1, 1) == "doubling"
    for ranks, density in product([3, 5, 9, 64, 1000], [0.001, 0.01, 0.1, 1.0]):
        own = {way: port_bytes(way, ranks, 2 * density * whole, whole) for way in ("gathered", "split")}
        assert min(own.values()) == own["split" if chosen(ranks, density) == "split" else "gathered"]


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(RequestError):
        build("compressor", "top_k(route=tree)", COMPRESSORS)
