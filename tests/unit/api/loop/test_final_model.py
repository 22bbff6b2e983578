"""The final model, of what all workers hand in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from polyrhythm.api.loop.loop_duties import final_model, load_final_model
from polyrhythm.roles.control_messages import FinalModel


def test_parameters_and_counters_are_worker_0s_and_statistics_are_averaged() -> None:
    norms = [nn.BatchNorm1d(2) for _ in range(3)]
    third = torch.tensor([1 / 3, -float("inf")])
    for worker, norm in enumerate(norms):
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        norm.running_mean.copy_(torch.tensor([1.0, 10.0]) * worker)
        norm.num_batches_tracked.fill_(5 + worker)
        norm.register_buffer("constant", third.clone())

    made = final_model(torch.zeros(4), [dict(norm.named_buffers()) for norm in norms])
    traveled = FinalModel.from_message(made.message())
    last: Any = SimpleNamespace(
        flat=SimpleNamespace(vector=torch.full((4,), 2.0), spread_parameters=lambda: None),
        buffers=dict(norms[2].named_buffers()),
    )
    load_final_model(last, traveled)
    assert last.flat.vector.tolist() == [0.0] * 4
    assert norms[2].running_mean.tolist() == [1.0, 10.0]
    assert norms[2].num_batches_tracked.item() == 5
    assert torch.equal(norms[2].constant, third)
