from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.roles.dry_run import StandIn
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.model_sizes import ModelSizes

RESNET = ModelSizes((2_050_000, 4_200_000, 1_050_000, 16_257_032), (0.1, 0.2, 0.3, 0.4))


def test_a_small_model_stands_for_itself() -> None:
    sizes = ModelSizes((3, 100), (0.5, 0.5))
    assert StandIn.small(sizes, workers=9, servers=2, slices=9) == StandIn.whole(sizes) == StandIn((3, 100))


@pytest.mark.parametrize("workers", [1, 7, 1000])
@pytest.mark.parametrize("servers", [0, 1, 3, 16])
@pytest.mark.parametrize("slices", [1, 2, 7])
def test_shards_and_slices_are_as_even_as_those_of_the_model(workers: int, servers: int, slices: int) -> None:
    made = StandIn.small(RESNET, workers, servers, slices)
    assert made.numbers * made.scale == pytest.approx(RESNET.parameters, rel=1e-12)
    assert all(count % slices == 0 for count in made.buckets)
    if servers:
        assert len({shard.stop - shard.start for shard in shards(made.numbers, servers)}) == 1
    parts = zip(made.buckets, RESNET.buckets, strict=True)
    assert all(abs(count * made.scale - size) <= slices * made.scale for count, size in parts)


def test_thousands_of_workers_find_room() -> None:
    assert StandIn.small(RESNET, workers=10_000, servers=4, slices=1).numbers <= 1100
    assert StandIn.small(RESNET, workers=64, servers=0, slices=64).numbers * 64 <= 1 << 24


def test_a_tiny_bucket_has_a_number_too() -> None:
    made = StandIn.small(ModelSizes((10, 10**8), (0.5, 0.5)), workers=4, servers=1, slices=1)
    assert made.buckets == (1, 1023)


def test_the_copy_has_a_parameter_a_bucket_and_the_models_dtype() -> None:
    flat = StandIn((5, 2, 9), dtype=torch.float64).flat()
    assert flat.vector.dtype == torch.float64
    assert [(bucket.start, bucket.stop) for bucket in flat.buckets] == [(11, 18), (9, 11), (0, 9)]
    assert flat.size == 16


def test_numbers_are_scaled_and_headers_and_texts_are_not() -> None:
    made = StandIn((4,), scale=2.5)
    assert made.nbytes(Message(Kind.PUSH, torch.zeros(3))) == 64 + 30
    assert made.nbytes(Message(Kind.PULL)) == 64
    text = Message(Kind.CONFIGURE, pack_json({"kind": "SGD"}))
    assert made.nbytes(text) == text.nbytes > 64
