"""Rounds of local steps with models that an aggregator combines: wrong models of some workers do no harm."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.jobs import make_job, result_of, resumed, simulated, stop_at, strategy, vector_of
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.averaging.local_sgd import LocalSGD
from polyrhythm.strategies.averaging.rounds.rounds_worker import RoundsWorker
from simulation.trying import trial

WORKERS, WRONG = 5, 2
AGGREGATORS = ["trimmed_mean(k=1)", "coordinate_median(f=1)", "krum(f=1)", "multi_krum(f=1)"]


def spec_of(aggregator: str) -> str:
    return f"local_sgd(steps=3, aggregator={aggregator})"


def planted(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Calls `change` with a worker part at the end of each of its rounds."""
    end_round = RoundsWorker._end_round

    def changed(self: Any) -> None:
        change(self)
        end_round(self)

    monkeypatch.setattr(RoundsWorker, "_end_round", changed)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_all_continue_from_what_the_aggregator_makes_of_their_models(
    aggregator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[int, dict[int, Tensor]] = defaultdict(dict)
    after: dict[int, dict[int, Tensor]] = defaultdict(dict)
    end_round = RoundsWorker._end_round

    def noted(self: Any) -> None:
        number, worker = self.exchanger.log.merged, self._worker
        before[number][worker] = self._flat.vector.clone()
        end_round(self)
        after[number][worker] = self._flat.vector.clone()

    monkeypatch.setattr(RoundsWorker, "_end_round", noted)
    simulated(make_job(spec_of(aggregator), WORKERS))
    rule = strategy(spec_of(aggregator)).aggregator
    assert len(before) >= 2
    for number, models in before.items():
        assert len(models) == WORKERS
        vectors = [models[worker] for worker in range(WORKERS)]
        distances = torch.cdist(torch.stack(vectors).double(), torch.stack(vectors).double()) ** 2
        expected = rule.aggregate(vectors, [1.0] * WORKERS, distances)
        assert all(torch.equal(found, expected) for found in after[number].values())


def accuracy(spec: str) -> float:
    data = open_data("digits")
    job = make_job(
        spec,
        WORKERS,
        dataset=data,
        epochs=12,
        batch_size=48,
        optimizer="sgd(lr=0.2)",
        model=lambda: create_model("mlp", classes=10, image_shape=data.image_shape),
    )
    return float(result_of(simulated(job).events)["test_top1"])


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_a_worker_with_wrong_models_does_no_harm(aggregator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = accuracy("local_sgd(steps=3)")

    def wrong(part: Any) -> None:
        if part._worker == WRONG:
            part._flat.vector.mul_(-3)

    planted(monkeypatch, wrong)
    assert accuracy(spec_of(aggregator)) > whole - 0.04
    assert accuracy("local_sgd(steps=3)") < 0.5, "the mean bears none"


def test_a_model_that_is_not_finite_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(part: Any) -> None:
        if part._worker == WRONG:
            part._flat.vector.fill_(float("nan"))

    planted(monkeypatch, wrong)
    assert accuracy(spec_of("coordinate_median(f=1)")) > 0.7


def test_it_survives_failed_workers() -> None:
    assert try_seeds(trial(spec_of("trimmed_mean(k=1)"), workers=6, steps=9), range(25)).failures == ()


def test_a_round_with_too_few_models_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSGD, "check", lambda self, workers, plan=None: None)
    started: list[Tensor] = []

    def noted(part: Any) -> None:
        started.append(part._beginning.clone())

    planted(monkeypatch, noted)
    trained = simulated(make_job(spec_of("trimmed_mean(k=1)"), 2))
    assert all(torch.equal(each, started[0]) for each in (*started, *map(vector_of, trained.models)))


@pytest.mark.parametrize("workers", [3, 6])
def test_it_continues_with_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    from dataclasses import replace

    job = make_job(spec_of("trimmed_mean(k=1)"), WORKERS, folder=tmp_path)
    simulated(job, stop_at(0.047))
    other = simulated(resumed(replace(job, workers=workers)))
    assert other.events[-1].outcome == "done"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("aggregator=weighted_mean", "is the default: leave it out"),
        ("aggregator=trimmed_mean, compress=top_k", "exclude each other"),
        ("aggregator=trimmed_mean, optimizer_state=average", "exclude each other"),
        ("aggregator=krum(f=2)", "needs at least 7 models, and there are 5 workers"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        strategy(f"local_sgd({options})").check(WORKERS)
