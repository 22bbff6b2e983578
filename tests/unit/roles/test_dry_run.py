"""Dry runs of small things by hand; whole ones against training are in tests/equivalence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.jobs import OPTIMIZERS, strategy
from polyrhythm.communication.message import Message
from polyrhythm.data.dealing import batch_indices, epoch_order, steps_per_epoch
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.run import dry_events
from polyrhythm.simulation.simulated_run import ConstantCluster
from polyrhythm.specs import build
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.training.model_sizes import ModelSizes

SIZES = ModelSizes((6_000_000, 4_000_000), (0.25, 0.75))


def dry_run(spec: str, workers: int = 3, steps: int = 5, **values: Any) -> DryRun:
    chosen = {"sizes": SIZES, "batch_size": 4, **values}
    return DryRun(strategy=strategy(spec), workers=workers, steps=steps, **chosen)


def test_batches_are_as_large_as_in_training() -> None:
    made = dry_run("synchronous", epoch_images=53, steps=10)
    order = epoch_order(53, 0, 0)
    assert made.steps_per_epoch == steps_per_epoch(53, 3, 4) == 5
    for step in range(10):
        for worker in range(3):
            assert made.images(worker, step) == len(batch_indices(order, step % 5, worker, 3, 4))


def test_given_gradients_are_applied_to_the_last_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers and a rate of 1: the servers hold minus the sum of all that was pushed."""
    values: dict[int, Tensor] = {}
    take = ServerSession.on_message

    def kept(self: ServerSession, source: int, message: Message) -> Any:
        values[id(self)] = self.values
        return take(self, source, message)

    monkeypatch.setattr(ServerSession, "on_message", kept)

    def gradient(worker: int, step: int, gradients: Tensor) -> None:
        gradients.fill_(worker + 10 * step)
        gradients[worker] += 100

    made = dry_run(
        "parameter_server(servers=2)",
        steps=4,
        optimizer=build("optimizer", "sgd(lr=1, momentum=0)", OPTIMIZERS),
        gradient=gradient,
    )
    dry_events(made, ConstantCluster(step_s=lambda worker: 0.1 + 0.01 * worker))
    shards = list(values.values())
    pushed = 4 * (0 + 1 + 2) + 3 * 10 * (0 + 1 + 2 + 3)
    expected = torch.full((made.stand_in.numbers,), -float(pushed))
    expected[:3] -= 400
    assert torch.equal(torch.cat(shards), expected)
