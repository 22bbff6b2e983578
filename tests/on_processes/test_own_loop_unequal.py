"""A loop of one's own on real processes with gossip and local updates, against plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from on_processes import drawn_loop_task
from on_processes import unequal_loop_task as task
from on_processes.forked_script import run_forked
from tolerances import REORDERED

Exchange = Callable[[list[Tensor], int], list[Tensor]]


def vectors(folder: Path) -> list[Tensor]:
    """Gives what each worker has saved, in their order."""
    saved = [torch.load(path, weights_only=True) for path in sorted(folder.glob("worker-*.pt"))]
    return [torch.cat([value.reshape(-1) for value in entry.values()]) for entry in saved]


def reference(workers: int, exchange: Exchange) -> Tensor:
    """Trains every worker's model in plain torch, with an exchange after every step; gives the mean of all."""
    models = [task.network() for _ in range(workers)]
    optimizers = [task.optimizer_of(model) for model in models]
    for step in range(task.STEPS):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            task.loss_of(model, worker, step).backward()
            optimizer.step()
        found = exchange([parameters_to_vector(model.parameters()).detach() for model in models], step)
        for model, vector in zip(models, found, strict=True):
            vector_to_parameters(vector.clone(), model.parameters())
    return torch.stack([parameters_to_vector(model.parameters()).detach() for model in models]).mean(0)


def averaged_every_three(found: list[Tensor], step: int) -> list[Tensor]:
    return [torch.stack(found).mean(0)] * len(found) if step % 3 == 2 else found


def pushed(found: list[Tensor], step: int) -> list[Tensor]:
    """Keeps half, and sends half one place on in even steps and two in odd ones; three workers' masses stay 1."""
    offset = 1 if step % 2 == 0 else 2
    return [(found[i] + found[i - offset]) / 2 for i in range(len(found))]


@pytest.mark.parametrize(
    ("strategy", "workers", "exchange"),
    [("local_sgd(steps=3)", 2, averaged_every_three), ("sgp", 3, pushed)],
    ids=["local_sgd", "sgp"],
)
def test_several_workers_learn_what_plain_torch_does(
    strategy: str, workers: int, exchange: Exchange, tmp_path: Path
) -> None:
    run_forked(task.__file__, [strategy, str(tmp_path)], tmp_path, workers=workers, restarts=0)
    found = vectors(tmp_path)
    assert len(found) == workers
    for vector in found:
        torch.testing.assert_close(vector, reference(workers, exchange), **REORDERED)


def test_pairs_at_their_own_pace_end_with_one_model_that_has_learned(tmp_path: Path) -> None:
    run_forked(task.__file__, ["ad_psgd", str(tmp_path)], tmp_path, workers=2, restarts=0)
    first, second = vectors(tmp_path)
    assert torch.equal(first, second)
    before, after = task.network(), task.network()
    vector_to_parameters(first, after.parameters())
    losses = [
        sum(task.loss_of(model, worker, step).item() for worker in range(2) for step in range(task.STEPS))
        for model in (before, after)
    ]
    assert losses[1] < 0.9 * losses[0]


def test_workers_that_draw_see_each_image_once_and_the_fast_one_sees_more(tmp_path: Path) -> None:
    run_forked(drawn_loop_task.__file__, ["parameter_server", str(tmp_path)], tmp_path, workers=2, restarts=0)
    fast, slow = (json.loads((tmp_path / f"seen-{worker}.json").read_text()) for worker in (0, 1))
    for epoch in range(drawn_loop_task.EPOCHS):
        assert sorted(fast[epoch] + slow[epoch]) == list(range(drawn_loop_task.IMAGES))
        assert len(fast[epoch]) > len(slow[epoch])
    assert slow[0] or slow[1]
