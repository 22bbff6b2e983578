"""Every image of a shard counts once: in tests, in rounds that are not whole, in steps that would be too small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.api.join import Group
from tolerances import REORDERED
from unit.api.alone import flat, network, points
from unit.api.loop.threads import run_in_threads


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["loader", "stream"])
def test_a_test_counts_each_image_once(workers: int, stream: bool) -> None:
    data = points(13)
    x, y = data.tensors
    model = network()
    right = float((model(x).argmax(1) == y).double().mean())

    def loop(group: Group) -> tuple[int, float]:
        models = network()
        with group:
            group.distribute(models, torch.optim.SGD(models.parameters(), lr=0.1))
            loader = DataLoader(data, 2)
            seen = hits = 0
            with torch.no_grad():
                for inputs, labels in group.shard(list(loader) if stream else loader):
                    hits += int((models(inputs).argmax(1) == labels).sum())
                    seen += len(labels)
            return sum(group.gather(seen)), group.average(hits / max(1, seen), seen)

    for seen, accuracy in run_in_threads("synchronous", workers, loop):
        assert seen == 13
        assert accuracy == pytest.approx(right, rel=1e-12)


def test_a_test_with_gradients_says_what_it_counts_twice(capfd: pytest.CaptureFixture[str]) -> None:
    def loop(group: Group) -> int:
        model = network()
        with group:
            group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            return sum(len(labels) for _, labels in group.shard(DataLoader(points(13), 2)))

    assert sum(run_in_threads("synchronous", 2, loop)) == 14
    assert capfd.readouterr().err.count("go through the shard inside of torch.no_grad()") == 1


def test_the_last_batch_of_a_batch_sampler_is_trained_on() -> None:
    """Five batches on two workers: as steps of two batches each, and one of the fifth."""
    data = points(15)
    batches = [[0, 1, 2, 3], [4, 5, 6], [7, 8], [9, 10, 11], [12, 13, 14]]
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in (batches[0] + batches[1], batches[2] + batches[3], batches[4]):
        x, y = data[step]
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loop(group: Group) -> torch.Tensor:
        model = network()
        with group:
            model, own = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for x, y in group.shard(DataLoader(data, batch_sampler=batches)):
                nn.functional.cross_entropy(model(x), y).backward()
                own.step()
                own.zero_grad()
        return flat(model)

    for found in run_in_threads("synchronous", 2, loop):
        torch.testing.assert_close(found, flat(plain), **REORDERED)


def normalized() -> nn.Module:
    model = network()
    return nn.Sequential(model[0], nn.BatchNorm1d(8, dtype=torch.float64), *model[1:])


@pytest.mark.parametrize("synchronized", [True, False])
def test_no_step_is_too_small_for_a_batch_norm(synchronized: bool) -> None:
    """34 images in batches of 16 on two workers are steps of 17 images, with joint statistics the plain ones."""
    data = points(34)
    plain = normalized()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in DataLoader(data, 17):
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loop(group: Group) -> torch.Tensor:
        model: Any = normalized()
        if synchronized:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        with group:
            model, own = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for x, y in group.shard(DataLoader(data, 16)):
                nn.functional.cross_entropy(model(x), y).backward()
                own.step()
                own.zero_grad()
        return flat(model)

    for found in run_in_threads("synchronous", 2, loop):
        if synchronized:
            torch.testing.assert_close(found, flat(plain), **REORDERED)
        assert bool(found.isfinite().all())


def test_a_loop_over_one_shard_in_a_dataset_of_odd_length_sees_all_of_it() -> None:
    seen: list[list[int]] = []

    def loop(group: Group) -> None:
        model = network()
        with group:
            group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with torch.inference_mode():
                shard = group.shard(DataLoader(TensorDataset(torch.arange(11)), 4))
                seen.append([int(each) for (batch,) in shard for each in batch])

    run_in_threads("synchronous", 2, loop)
    assert sorted(number for each in seen for number in each) == list(range(11))
