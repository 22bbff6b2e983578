"""Statistics of batch normalization of several workers as one model's."""

from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polyrhythm.roles.checkpointing.worker_state import mean_buffers


def state_of(worker):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].running_mean.copy_(torch.tensor([float(worker), 1.0]))
    model[0].num_batches_tracked.fill_(worker)
    return SimpleNamespace(buffers=dict(model.named_buffers()))


def test_buffers_are_averaged_and_counters_are_worker_0s():
    mean = mean_buffers([state_of(worker) for worker in (1, 2, 6)])
    assert mean["0.running_mean"].tolist() == [3.0, 1.0]
    assert mean["0.num_batches_tracked"] == 1


def test_the_mean_variance_is_that_of_all_pictures_though_means_differ():
    # Four workers draw batches of 12 numbers from the same data. Adding what their means differ by would be too much.
    data = torch.randn(400, 4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    kept, added = [], []
    for batches in data:
        states = []
        for batch in batches:
            norm = nn.BatchNorm1d(1, momentum=1.0, dtype=torch.float64)
            norm(batch[:, None])
            states.append(SimpleNamespace(buffers=dict(norm.named_buffers())))
        kept.append(mean_buffers(states)["running_var"].item())
        added.append(kept[-1] + batches.mean(1).var().item())
    assert fmean(kept) == pytest.approx(data.var().item(), rel=0.01)
    assert fmean(added) == pytest.approx((1 + 1 / 12) * data.var().item(), rel=0.02)
