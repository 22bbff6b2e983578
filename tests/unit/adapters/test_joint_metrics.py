"""Metrics of torchmetrics in a loop of a user's own: each worker computes the value over all of them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.api.join import Group
from polyrhythm.models.create import define_missing_operators
from unit.api.loop.threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore")  # of what torchmetrics imports
_operators = define_missing_operators()  # torchmetrics imports torchvision

SCORES = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7], [0.4, 0.6]])
LABELS = torch.tensor([0, 1, 1, 0, 1])


def metrics() -> nn.Module:
    """Return metrics whose states are sums, and lists of all scores."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

    micro = MulticlassAccuracy(num_classes=2, average="micro")
    return MetricCollection({"accuracy": micro, "auroc": BinaryAUROC()}, compute_groups=False)


def update(made: Any, places: slice) -> None:
    made["accuracy"].update(SCORES[places], LABELS[places])
    made["auroc"].update(SCORES[places, 1], LABELS[places])


@pytest.mark.parametrize("in_model", [True, False])
def test_the_joint_value_is_that_of_one_process(in_model: bool) -> None:
    alone: Any = metrics()
    update(alone, slice(None))
    expected = {name: float(value) for name, value in alone.compute().items()}
    models = [nn.Module() for _ in range(2)]

    def loop(group: Group) -> tuple[dict[str, float], float]:
        made: Any = metrics()
        model = models[group.rank]
        model.linear = nn.Linear(2, 2)
        if in_model:
            model.metrics = made
        with group:
            model, _ = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            if not in_model:
                made = group.joint_metric(made)
            deepcopy(model)
            update(made, slice(0, 2) if group.rank == 0 else slice(2, 5))
            joint = {name: float(value) for name, value in made.compute().items()}
        made.reset()
        update(made, slice(0, 2) if group.rank == 0 else slice(2, 5))
        return joint, float(made.compute()["accuracy"])

    found = run_in_threads("synchronous", 2, loop)
    assert [joint for joint, _ in found] == [pytest.approx(expected, abs=1e-6)] * 2
    assert [own for _, own in found] == pytest.approx([1.0, 1 / 3], abs=1e-6)  # after the run, each by itself


def test_a_metric_that_gathers_by_itself_is_left_alone() -> None:
    from torchmetrics import SumMetric

    def loop(group: Group) -> bool:
        model = nn.Linear(2, 2)
        own = SumMetric(dist_sync_fn=lambda state, group=None: [state])
        gathers = own.dist_sync_fn
        with group:
            group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            return group.joint_metric(own).dist_sync_fn is gathers

    assert run_in_threads("synchronous", 2, loop) == [True, True]
