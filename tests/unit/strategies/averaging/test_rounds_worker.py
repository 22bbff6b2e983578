"""Rounds of local steps, worker by worker: what a mean conserves, who hears of a stop, what a checkpoint holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.jobs import (
    make_job,
    resumed,
    simulated,
    stop_at,
    strategy,
    uneven,
)
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.worker_part import Step
from sample import failures_of
from simulation.trying import trial

WORKERS = 3
RATE = 0.5
UNEVEN = ConstantCluster(step_s=uneven)


def take(part, flat, number, gradient, *, stop=False, weight=1.0):
    flat.gradients.fill_(gradient)
    step = Step(number, weight, stop)
    part.begin(step)
    return part.gradients_ready(step, RATE)


@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd(steps=3, optimizer_state=average)",
        "post_local_sgd(after=4, steps=3)",
        "hierarchical_averaging(steps=2, steps_between=4)",
        "slowmo(steps=3)",
        "diloco(steps=3)",
    ],
)
@pytest.mark.parametrize("stop_s", [0.044, 0.079])
def test_a_resumed_run_has_the_same_bits(spec, stop_s, tmp_path):
    job = make_job(spec, WORKERS)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    stopped = simulated(kept, stop_at(stop_s))
    assert stopped.events[-1].outcome == "interrupted"
    assert 0 < stopped.checkpoint_steps[-1] < 10
    again = simulated(resumed(kept), UNEVEN)
    assert again.sha256 == simulated(job, UNEVEN).sha256


@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd(steps=2)",
        "hierarchical_averaging(group=2, steps=2, steps_between=4)",
        "post_local_sgd(after=3, steps=2)",
        "post_local_sgd(after=0.5, steps=3)",
        "diloco(steps=2)",
    ],
)
def test_invariants_hold_whatever_goes_wrong(spec):
    assert failures_of(trial(spec, workers=3, steps=10), range(20)) == ()


def test_a_mean_that_leaves_somebody_out_is_noticed(monkeypatch):
    def halved(self, stop, weight=1.0):
        found = take_all(self, stop, weight)
        return found._replace(vector=found.vector * 0.5)

    take_all = ModelMean.take
    monkeypatch.setattr(ModelMean, "take", halved)
    tried = try_seeds(trial("local_sgd(steps=2)", workers=3, steps=4), range(1))
    assert "the sum of all workers' mean gradients" in tried.failures[0].what


@pytest.mark.parametrize(
    ("spec", "workers", "words"),
    [
        ("local_sgd(steps=0)", 2, "steps should be greater than or equal to 1"),
        ("diloco(outer=none)", 2, "diloco needs an outer optimizer: give outer=sgd"),
        ("diloco(outer=sdg)", 2, "unknown outer optimizer 'sdg'"),
        ("hierarchical_averaging(group=4)", 3, "group=4 is larger than all 3 workers: give a smaller group"),
        ("hierarchical_averaging(steps=8)", 2, "no mean is of a group alone: give a larger steps_between"),
        ("post_local_sgd(after=2.5)", 2, "neither a share of the run nor a whole number of steps"),
        ("bmuf(block_momentum=1)", 2, "block_momentum should be less than 1"),
        ("local_sgd(optimizer_state=forget)", 2, "should be 'keep', 'average' or 'reset'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec, workers, words):
    with pytest.raises(RequestError) as caught:
        strategy(spec).check(workers)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_share_of_a_run_of_unknown_length_is_refused():
    with pytest.raises(
        RequestError, match=r"after=0\.5 is a share of the run, and the length of your own loop"
    ):
        strategy("post_local_sgd(after=0.5)").first_local_step(None)
    assert strategy("post_local_sgd(after=0)").first_local_step(None) == 0
