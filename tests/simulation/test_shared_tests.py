"""The test at an epoch's end is shared by workers that go in step and hold the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from conformance.jobs import blobs, make_job, simulated
from polyrhythm.data.balance import BALANCES
from polyrhythm.events import Evaluated, RunEnded
from polyrhythm.roles import model_workload
from polyrhythm.specs import build
from simulation.deaths import events_of

WORKERS, TESTS, EPOCHS = 3, 2300, 3


def job_of(spec: str, **options):
    return make_job(spec, WORKERS, dataset=blobs(60, TESTS), epochs=EPOCHS, **options)


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The batches of every part that a worker tests."""
    found: list[range] = []
    plain = model_workload.evaluate_part

    def noted(model, split, batches, **options):
        found.append(batches)
        return plain(model, split, batches, **options)

    monkeypatch.setattr(model_workload, "evaluate_part", noted)
    return found


def evaluations(events) -> list[Evaluated]:
    """What tests came to, whenever: parts make messages longer."""
    return [replace(event, time_s=0) for event in events if isinstance(event, Evaluated)]


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("synchronous", {}),
        ("lazy_synchronous", {}),
        ("parameter_server(consistency=synchronous, servers=2)", {}),
        ("synchronous", {"model": normalized}),
        ("lazy_synchronous", {"model": normalized}),
    ],
)
def test_each_worker_tests_a_part_and_the_result_has_the_bits_of_one(
    spec: str, options, tested: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulated(job_of(spec, **options))
    shared = evaluations(whole.events)
    each_epoch = [range(1), range(1, 3), range(3, 5)]  # five batches
    assert sorted(tested, key=lambda part: part.start) == sorted(
        each_epoch * (EPOCHS - 1), key=lambda part: part.start
    )
    monkeypatch.setattr(model_workload.ModelWorkload, "part_of_test", lambda *_, **__: None)
    alone = simulated(job_of(spec, **options))
    assert shared == evaluations(alone.events)
    assert whole.sha256 == alone.sha256
    assert len(shared) == EPOCHS


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server(consistency=synchronous)"])
def test_parts_of_a_test_are_those_of_the_global_batch(spec: str, tested: list[range]) -> None:
    balance = build("balance", "given(weights=[4, 1, 1])", BALANCES)
    evaluations_of = evaluations(simulated(replace(job_of(spec), balance=balance)).events)
    each_epoch = [range(3), range(3, 4), range(4, 5)]  # of five batches
    assert sorted(tested, key=lambda part: part.start) == sorted(
        each_epoch * (EPOCHS - 1), key=lambda part: part.start
    )
    assert len(evaluations_of) == EPOCHS


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("local_sgd(steps=2)", {}),
        ("parameter_server", {}),
        ("parameter_server(consistency=synchronous)", {"model": normalized}),
        ("synchronous", {"weight_average": 0.9}),
    ],
)
def test_what_others_do_not_hold_is_tested_by_worker_0(spec: str, options, tested: list[range]) -> None:
    assert len(evaluations(simulated(job_of(spec, **options)).events)) == EPOCHS
    assert not tested


@pytest.mark.parametrize("at_s", [round(0.01 + 0.005 * place, 3) for place in range(8)])
@pytest.mark.parametrize("options", [{}, {"model": normalized}], ids=["plain", "normalized"])
def test_a_lost_workers_part_is_tested_by_worker_0(at_s: float, options) -> None:
    events = events_of(job_of("synchronous", **options), [(at_s, 1)], [(at_s + 0.02, 1)])
    assert isinstance(events[-1], RunEnded)
    assert [event.epoch for event in evaluations(events)] == [1, 2, 3]
