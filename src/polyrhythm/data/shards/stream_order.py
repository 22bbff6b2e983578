"""The order in which records of shards are read: each worker its own shards, front to back, through a shuffle buffer.

    worker 0   shard 3 ────▶ shard 0 ────▶ …  ─▶ ┌ buffer ┐ ─▶ a random one leaves, the next record takes its place
    worker 1   shard 1 ────▶ shard 4 ────▶ …  ─▶ └ buffer ┘ ─▶

A pure function of seed and epoch: whoever resumes goes on where they were, and nothing needs to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.data.dealing.seeding import generator_for


def stream_order(sizes: Sequence[int], epoch: int, seed: int, workers: int, buffer: int) -> Tensor:
    """Gives an epoch's order, a permutation of all records; place p is read by worker p mod `workers`.

    A worker whose shards are read up takes over from the one that has most left, so that all are read once.

    Args:
        sizes: records of each shard; they are numbered through in this order.
        epoch: from 0; every epoch deals the shards anew.
        seed: of the run.
        workers: how many read.
        buffer: records that a worker holds back to draw from; 1 keeps the order of the shards.

    Returns:
        (n,) int64.
    """
    generator = generator_for("shards", seed, epoch)
    dealt = torch.randperm(len(sizes), generator=generator).tolist()
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    streams: list[list[int]] = [[] for _ in range(workers)]
    for shard in dealt:  # to whoever has least, so that streams are about equally long
        shortest = min(streams, key=len)
        shortest.extend(range(starts[shard], starts[shard + 1]))
    shuffled = [
        _through_buffer(stream, buffer, generator_for("shuffle buffer", seed, epoch, worker))
        for worker, stream in enumerate(streams)
    ]
    return torch.tensor(_interleaved(shuffled), dtype=torch.int64)


def _through_buffer(stream: list[int], buffer: int, generator: torch.Generator) -> list[int]:
    held, left = stream[:buffer], []
    chances = torch.rand(len(stream), generator=generator, dtype=torch.float64).tolist()
    for number, record in enumerate(stream[buffer:]):
        place = int(chances[number] * len(held))
        left.append(held[place])
        held[place] = record
    for chance in chances[len(left) :]:
        place = int(chance * len(held))
        held[place], held[-1] = held[-1], held[place]
        left.append(held.pop())
    return left


def _interleaved(streams: list[list[int]]) -> list[int]:
    """Takes from the streams in turn; for one that is empty, from the end of the longest."""
    total = sum(map(len, streams))
    ahead = [stream[::-1] for stream in streams]
    order = []
    for place in range(total):
        own = ahead[place % len(ahead)]
        order.append(own.pop() if own else max(ahead, key=len).pop(0))
    return order
