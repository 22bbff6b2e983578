"""Loops whose workers have parts of every step by weight: steps are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.api.join import Group
from polyrhythm.errors import PolyrhythmError, RequestError
from tolerances import REORDERED
from unit.api.alone import flat, network, points
from unit.api.loop.threads import run_in_threads

IMAGES, BATCH, WORKERS, RATE = 44, 4, 3, 0.1
WEIGHTS = (3.0, 2.0, 1.0)


def started() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def loop(group: Group, weights: tuple[float, ...] = WEIGHTS) -> tuple[Tensor, int]:
    model, optimizer = started()
    seen = 0
    with group:
        model, optimizer = group.distribute(model, optimizer)
        shard = group.shard(DataLoader(points(IMAGES), batch_size=BATCH), weights=weights)
        for _ in range(2):
            for x, y in shard:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += len(x) if shard.weight else 0
    return flat(model), seen


@pytest.mark.parametrize("strategy", ["synchronous", "parameter_server(consistency=synchronous)"])
def test_steps_are_those_of_the_global_batch(strategy: str) -> None:
    model, optimizer = started()
    for _ in range(2):
        for x, y in DataLoader(points(IMAGES), batch_size=WORKERS * BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = run_in_threads(strategy, WORKERS, loop)
    for vector, _ in found:
        torch.testing.assert_close(vector, flat(model), **REORDERED)
    assert [seen for _, seen in found] == [
        44,
        30,
        14,
    ]  # of 12 images 6, 4 and 2; of the last 8 four, three and one
    assert sum(seen for _, seen in found) == 2 * IMAGES


@pytest.mark.parametrize(
    ("strategy", "weights", "reason"),
    [
        ("synchronous", (1.0, 2.0), "2 weights are not one for each of 3 workers: give 3"),
        ("synchronous", (1.0, 2.0, 0.0), "the weight 0 of worker 2 is not above 0"),
        ("synchronous", (1000.0, 1000.0, 1.0), "worker 2 would have none of the 12 images"),
        ("parameter_server", WEIGHTS, "give batches='dynamic' where the strategy is asynchronous"),
        ("d_psgd", WEIGHTS, "counts all workers alike"),
    ],
)
def test_what_cannot_be_is_refused(strategy: str, weights: tuple[float, ...], reason: str) -> None:
    with pytest.raises((RequestError, PolyrhythmError)) as error:
        run_in_threads(strategy, WORKERS, lambda group: loop(group, weights))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_worker_alone_has_all() -> None:
    data = TensorDataset(torch.arange(6.0).view(6, 1))

    def alone(group: Group) -> int:
        with group:
            model = nn.Linear(1, 1)
            model, _ = group.distribute(model, torch.optim.SGD(model.parameters(), lr=RATE))
            return sum(len(batch) for (batch,) in group.shard(DataLoader(data, 2), weights=[1.0]))

    assert run_in_threads("synchronous", 1, alone) == [6]
