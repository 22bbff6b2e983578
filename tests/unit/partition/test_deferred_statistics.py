"""Running statistics of microbatches, changed once a batch, are those that torch keeps of whole batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.partition.deferred_statistics import DeferredStatistics

SIZES = (5, 5, 4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_whole_batches(momentum: float | None) -> None:
    whole, cut = (nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64) for _ in range(2))
    statistics = DeferredStatistics(cut, len(SIZES))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        images = torch.randn(sum(SIZES), 3, 2, 2, generator=generator, dtype=torch.float64) * 2 + 1e3
        whole(images)
        before = cut.running_mean.clone()
        for position, part in enumerate(images.split(list(SIZES))):
            statistics.begin(position)
            outputs = cut(part)
            statistics.end()
            # Each by its own statistics, whatever the others are.
            torch.testing.assert_close(outputs.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64))
            statistics.begin(None)  # computed again, which does not count
            assert torch.equal(cut(part), outputs)
            statistics.end()
        assert torch.equal(cut.running_mean, before)
        statistics.commit()
    for name, value in whole.named_buffers():
        torch.testing.assert_close(cut.get_buffer(name), value, rtol=1e-12, atol=0)
