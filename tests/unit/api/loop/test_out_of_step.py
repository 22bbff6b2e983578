"""A worker whose loop takes another number of passes than the others' is named by all, at once."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.api.join import Group
from polyrhythm.errors import OutOfStep
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


LINE = r"\(test_out_of_step\.py:\d+\)"


@pytest.mark.parametrize(
    ("odd", "first", "second"),
    [
        (
            "skips",
            f"at step 8 with batch 2 of epoch 1 {LINE}",
            f"is at step 8 with batch 3 of epoch 1 {LINE}",
        ),
        ("breaks", f"at step 8 with batch 2 of epoch 1 {LINE}", "has left the loop after 8 steps"),
        (
            "passes",
            f"at step 9 with batch 3 of epoch 1 {LINE}",
            f"is at step 8 with batch 2 of epoch 1 {LINE}",
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
