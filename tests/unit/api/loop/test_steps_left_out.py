"""A loop of one's own that the others did not wait for: it leaves out steps, and ends after as many as they."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import nn, optim

from polyrhythm.api.join import join
from polyrhythm.strategies.allreduce import synchronous
from unit.api.alone import flat, network, points


class Skipping(synchronous.SynchronousWorker):
    """A part that the others have left behind after its second step."""

    def next_step(self, step: int) -> int:
        return 5 if step == 1 else step + 1


def test_steps_change_nothing_until_the_loop_is_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "POLYRHYTHM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(synchronous, "SynchronousWorker", Skipping)
    inputs, labels = points(24).tensors
    model = network()
    with join() as group:
        model, optimizer = group.distribute(model, optim.SGD(model.parameters(), lr=0.1))
        states = [flat(model)]
        for _ in range(8):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            states.append(flat(model))
    changed = [bool((before != after).any()) for before, after in pairwise(states)]
    assert changed == [True, True, False, False, False, True, True, True]
    assert optimizer.steps == 8
