from __future__ import annotations

import pytest

from polyrhythm.roles.dry_run import StandIn
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.model_sizes import ModelSizes

RESNET = ModelSizes((2_050_000, 4_200_000, 1_050_000, 16_257_032), (0.1, 0.2, 0.3, 0.4))


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
