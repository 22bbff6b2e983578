"""Loops of one's own on GPUs beside CPUs; a GPU is imitated, as what a worker says its model is on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.api.join import Group
from polyrhythm.api.loop.coordination import Coordination
from polyrhythm.errors import PolyrhythmError, RequestError, RunError
from unit.api.loop.threads import run_in_threads

REFUSED = (
    "the model of worker 1 is on cuda, and that of worker 0 on cpu: workers of synchronous update each its own copy of "
    "one model, which GPUs and CPUs round differently, so that the copies would part: take "
    'parameter_server(consistency=synchronous), local_sgd, or one kind of device, such as model.to("cpu") on all'
)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1's model is said to be on a GPU."""
    check = Coordination.check_device

    def imitated(coordination: Coordination, kind: str) -> None:
        check(coordination, "cuda" if coordination._worker == 1 else kind)

    monkeypatch.setattr(Coordination, "check_device", imitated)


def loop(group: Group) -> int:
    torch.manual_seed(group.rank)
    model = nn.Linear(4, 3)
    with group:
        model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        return optimizer.steps


@pytest.mark.parametrize("strategy", ["synchronous", "lazy_synchronous"])
def test_a_gpu_beside_cpus_is_refused_where_copies_must_agree(one_gpu: None, strategy: str) -> None:
    errors: dict[int, PolyrhythmError] = {}

    def refused(group: Group) -> None:
        try:
            loop(group)
        except RequestError as error:
            errors[group.rank] = error
            raise

    with pytest.raises((RequestError, RunError)):  # the others, whose partner is gone
        run_in_threads(strategy, 2, refused)
    assert {rank: str(error) for rank, error in errors.items()} == {1: REFUSED}  # lazily: only under train


@pytest.mark.parametrize("strategy", ["parameter_server", "local_sgd", "ad_psgd"])
def test_it_is_taken_where_workers_get_their_parameters_from_others(one_gpu: None, strategy: str) -> None:
    assert run_in_threads(strategy, 2, loop) == [2, 2]


def test_one_kind_of_device_is_taken_everywhere() -> None:
    assert run_in_threads("synchronous", 2, loop) == [2, 2]
