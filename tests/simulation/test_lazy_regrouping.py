"""Workers lose some of their number while the updates of their layers come one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from conformance.jobs import blobs, make_job, perceptron, result_of
from polyrhythm.events import RunEnded
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.allreduce.lazy_synchronous import LazyWorker
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.model_sizes import ModelSizes
from sample import failures_of
from simulation.deaths import BATCH_SIZE, IMAGES, STEPS, WORKERS, events_of
from simulation.trying import layers

WHOLE_S = 0.177  # what a run takes
MOMENTS = [round(WHOLE_S * number / 9, 5) for number in range(9)]
EAGER_S = 0.02


def trained(spec: str, kills: Any, successors: Any = ()) -> tuple[Any, list[Tensor]]:
    """Runs a job; gives its events, and the parameters of all who have ever been there."""
    job = make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE)
    models: list[torch.nn.Module] = []

    def make() -> torch.nn.Module:
        models.append(perceptron())
        return models[-1]

    events = events_of(replace(job, make_model=make), kills, successors)
    return events, [parameters_to_vector(model.parameters()).detach() for model in models]


@pytest.mark.parametrize("pause_s", [None, 0.0005, 0.03])
def test_the_others_go_on_with_equal_bits_whenever_a_worker_dies(pause_s: float | None) -> None:
    _, (whole, *_) = trained("lazy_synchronous", [])
    for at_s in MOMENTS:
        successors = (
            [(at_s + pause_s, 1)] if pause_s is not None and at_s + pause_s < WHOLE_S - EAGER_S else []
        )
        events, vectors = trained("lazy_synchronous", [(at_s, 1)], successors)
        result = result_of(events)
        assert isinstance(events[-1], RunEnded)
        assert (events[-1].outcome, result["steps"], result["images_not_seen"]) == ("done", STEPS, 0)
        assert result["workers_joined"] == len(successors)
        equal = sum(torch.equal(vectors[0], vector) for vector in vectors)
        assert equal >= len(vectors) - 1 >= 1 + len(successors) - (at_s == 0)  # all but that of the dead
        assert torch.allclose(
            vectors[0], whole, atol=1e-5
        )  # every step is the same batch, added up by others


@pytest.mark.parametrize(
    "spec",
    ["lazy_synchronous", "lazy_synchronous(collective=ring)", "lazy_synchronous(piece_bytes=20000)"],
)
def test_each_layer_has_each_update_once_under_many_seeds(spec: str) -> None:
    assert failures_of(layers(spec), range(8)) == ()


def test_a_bucket_that_is_updated_again_is_found(monkeypatch: Any) -> None:
    """A worker that does not know which buckets of a repeated step are updated already updates all of them."""
    repeated: list[bool] = []
    begin = LazyWorker.begin

    def noting(self: LazyWorker, step: Step) -> None:
        repeated.append(step.number == self.exchanger.since and bool(self._made))
        begin(self, step)

    def forgetting(self: LazyWorker, step: Step) -> None:
        if step.number == self.exchanger.since:
            self._made = []
        begin(self, step)

    monkeypatch.setattr(LazyWorker, "begin", noting)
    faults = "kill(rank=any, every_s=0.2, restart_after_s=0.01)"
    tried = layers("lazy_synchronous(piece_bytes=200000)", faults=faults)
    slow = ModelSizes(
        (300_000, 300_000, 300_000), (0.1, 0.4, 0.4)
    )  # its last buckets travel when the first is used
    tried = replace(tried, dry_run=replace(tried.dry_run, sizes=slow))
    assert try_seeds(tried, range(4)).failures == ()
    assert sum(repeated) > 6
    monkeypatch.setattr(LazyWorker, "begin", forgetting)
    failures = try_seeds(tried, range(4)).failures
    assert any("parameters after step" in failure.what for failure in failures), failures
