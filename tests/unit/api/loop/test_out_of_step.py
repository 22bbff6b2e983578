"""A worker whose loop takes another number of passes than the others' is named by all, at once."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.api.join import Group
from polyrhythm.errors import OutOfStep, RequestError
from unit.api.loop.threads import run_in_threads


def loop(group: Group, odd: str) -> str:
    """Train, and on worker 1 leave out or break off; return what is raised."""
    torch.manual_seed(group.rank)
    many = 24 * group.workers
    data = TensorDataset(torch.randn(many, 4), torch.randint(3, (many,)))
    model = nn.Linear(4, 3)
    try:
        with group:
            model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for epoch, shard in enumerate([group.shard(DataLoader(data, 4))] * 2):
                for number, (x, y) in enumerate(shard):
                    if (group.rank, epoch, number) == (1, 1, 2):
                        if odd == "skips":
                            continue
                        if odd == "breaks":
                            break
                        if odd == "passes":
                            nn.functional.cross_entropy(model(x), y).backward()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    except OutOfStep as error:
        return str(error)
    return ""


RATE = ", learning rate 0.1"
LINE = r"\(test_out_of_step\.py:\d+\)"


@pytest.mark.parametrize(
    ("odd", "first", "second"),
    [
        (
            "skips",
            f"at step 8 with batch 2 of epoch 1 {LINE}{RATE}",
            f"is at step 8 with batch 3 of epoch 1 {LINE}{RATE}",
        ),
        ("breaks", f"at step 8 with batch 2 of epoch 1 {LINE}{RATE}", "has left the loop after 8 steps"),
        (
            "passes",
            f"at step 9 with batch 3 of epoch 1 {LINE}{RATE}",
            f"is at step 8 with batch 2 of epoch 1 {LINE}{RATE}",
        ),
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_all_say_where_each_is(odd: str, first: str, second: str, workers: int) -> None:
    said = run_in_threads("synchronous", workers, lambda group: loop(group, odd))
    assert len(set(said)) == 1
    assert re.match(f"worker 0 is {first}, worker 1 {second}", said[0]), said[0]
    assert "group.average" in said[0]


def test_loops_that_go_in_step_end_as_they_did() -> None:
    assert run_in_threads("synchronous", 3, lambda group: loop(group, "")) == [""] * 3


def plateau(group: Group, average: bool, epochs: bool) -> str:
    """Train with a schedule on each worker's own loss, which falls on worker 0 alone, or on that of all."""
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.zeros(8 * group.workers, 4), torch.zeros(8 * group.workers, dtype=torch.int64))
    try:
        with group:
            model, optimizer = group.distribute(
                model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            )
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            shard = group.shard(DataLoader(data, 4))
            for epoch in group.epochs(4, scheduler) if epochs else range(4):
                for x, y in shard:
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                loss = -float(epoch) if group.rank == 0 else float(epoch)
                scheduler.step(group.average(loss) if average else loss)
    except (OutOfStep, RequestError) as error:
        return str(error)
    return ""


def test_rates_that_differ_between_workers_are_noticed_before_they_are_used() -> None:
    said = run_in_threads("synchronous", 2, lambda group: plateau(group, average=False, epochs=False))
    assert len(set(said)) == 1
    first, second = (
        f"at step 4 with batch 0 of epoch 2 {LINE}{RATE}",
        f"at step 4 .*{LINE}, learning rate 0.05",
    )
    assert re.match(f"worker 0 is {first}, worker 1 is {second}", said[0]), said[0]
    assert "lowering the learning rate, be decided on group.average of all" in said[0]


@pytest.mark.parametrize(
    "strategy", ["local_sgd(steps=2)", "parameter_server(servers=1, consistency=synchronous)", "d_psgd"]
)
def test_epochs_compare_rates_of_all_that_go_in_step(strategy: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"workers have different learning rates at the beginning of an epoch, 0\.\d+ here"
    ):
        run_in_threads(strategy, 2, lambda group: _raised(plateau(group, average=False, epochs=True)))


def _raised(text: str) -> None:
    if text:
        raise RuntimeError(text)


@pytest.mark.parametrize("strategy", ["synchronous", "local_sgd(steps=2)"])
@pytest.mark.parametrize("epochs", [False, True])
def test_a_schedule_on_the_loss_of_all_goes_on(strategy: str, epochs: bool) -> None:
    assert run_in_threads(strategy, 2, lambda group: plateau(group, average=True, epochs=epochs)) == ["", ""]
