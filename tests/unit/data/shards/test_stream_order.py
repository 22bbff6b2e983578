"""The order of streams: every record once, each worker its own shards, a pure function."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.data.shards import stream_order

SIZES = (7, 5, 9, 6, 8, 5)


def _shard_of(record: int) -> int:
    bounds = torch.tensor(SIZES).cumsum(0)
    return int(torch.searchsorted(bounds, record, right=True))


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("buffer", [1, 4, 1000])
def test_every_record_is_read_once(workers: int, buffer: int) -> None:
    order = stream_order(SIZES, 3, 0, workers, buffer)
    assert sorted(order.tolist()) == list(range(sum(SIZES)))
    assert torch.equal(order, stream_order(SIZES, 3, 0, workers, buffer))


def test_epochs_and_seeds_differ() -> None:
    orders = [
        tuple(stream_order(SIZES, epoch, seed, 2, 10).tolist()) for epoch, seed in ((0, 0), (1, 0), (0, 1))
    ]
    assert len(set(orders)) == 3


def test_workers_read_shards_of_their_own() -> None:
    order = stream_order((6, 6, 6, 6), 0, 0, 2, 3).tolist()
    own = [{record // 6 for record in order[worker::2]} for worker in range(2)]
    assert own[0] | own[1] == {0, 1, 2, 3}
    assert len(own[0]) == len(own[1]) == 2


def test_without_a_buffer_shards_are_read_from_front_to_back() -> None:
    order = stream_order(SIZES, 0, 0, 1, 1).tolist()
    read: list[list[int]] = []
    for record in order:
        if not read or _shard_of(read[-1][-1]) != _shard_of(record):
            read.append([])
        read[-1].append(record)
    assert len(read) == len(SIZES)
    assert all(part == sorted(part) for part in read)


def test_a_record_leaves_at_most_a_buffer_early() -> None:
    order = stream_order((500,), 0, 0, 1, 20).tolist()
    assert all(record <= place + 19 for place, record in enumerate(order))
    assert order != sorted(order)
    displaced = torch.tensor(order) - torch.arange(500)
    assert displaced.abs().double().mean() > 5


def test_a_worker_without_shards_takes_over_from_the_others() -> None:
    order = stream_order((10,), 0, 0, 2, 1).tolist()
    assert sorted(order) == list(range(10))
    assert sorted(order[0::2] + order[1::2]) == list(range(10))
