"""Runs that go on with more or fewer servers than they had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.jobs import blobs, make_job, resumed, simulated, strategy
from polyrhythm.errors import RequestError
from polyrhythm.events import Notice
from polyrhythm.roles.checkpointing.archive import Archive
from polyrhythm.roles.job import Job
from polyrhythm.simulation.simulated_run import ConstantCluster
from polyrhythm.strategies.parameter_server.serving.resharding import recut
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan

WORKERS, STEPS = 3, 10


def job_of(spec: str, **options: Any) -> Job:
    return make_job(spec, WORKERS, dataset=blobs(53), batch_size=4, **options)


def continued(job: Job, spec: str) -> Job:
    return replace(resumed(job), strategy=strategy(spec))


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9)", "adam"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 5), (4, 1)])
def test_lock_step_goes_on_to_the_same_bits(before: int, after: int, optimizer: str, tmp_path: Path) -> None:
    spec = "parameter_server(servers={}, consistency=synchronous)"
    whole = simulated(job_of(spec.format(before), optimizer=optimizer)).result["parameters_sha256"]
    job = job_of(spec.format(before), optimizer=optimizer, folder=tmp_path)
    assert 0 < simulated(job, ConstantCluster(stop_at_s=0.035)).result["steps"] < STEPS
    found = simulated(continued(job, spec.format(after)))
    assert found.result["parameters_sha256"] == whole
    assert found.result["steps"] == STEPS
    (notice,) = [event.text for event in found.events if isinstance(event, Notice)]
    assert notice == (
        f"resumed with {after} servers in place of {before}: the shards are divided again, with the optimizers' states"
    )


@pytest.mark.parametrize(
    ("spec", "others"),
    [
        ("parameter_server(servers=2)", "parameter_server(servers=3, placement=dedicated)"),
        ("ssp(s=1, servers=2)", "ssp(s=1, servers=3, replicas=2)"),
        ("dc_asgd(servers=3, replicas=2)", "dc_asgd(servers=2)"),
        ("staleness_aware(servers=1)", "staleness_aware(servers=2)"),
    ],
)
def test_whoever_does_not_go_in_step_takes_all_steps_that_are_left(
    spec: str, others: str, tmp_path: Path
) -> None:
    job = job_of(spec, folder=tmp_path)
    simulated(job, ConstantCluster(stop_at_s=0.035))
    result = simulated(continued(job, others)).result
    servers = strategy(others).traits(WORKERS).servers
    assert sum(result["staleness"]["histogram"].values()) == servers * WORKERS * STEPS


def test_another_rule_is_another_strategy(tmp_path: Path) -> None:
    job = job_of("parameter_server(servers=2)", folder=tmp_path)
    simulated(job, ConstantCluster(stop_at_s=0.035))
    same = continued(job, "parameter_server(servers=3)")
    assert Archive(same).load().was is None
    other = continued(job, "parameter_server(servers=2, consistency=synchronous)")
    assert Archive(other).load().was == job.strategy


def test_every_number_keeps_what_it_had_and_counts_are_the_largest() -> None:
    """Two shards of a vector of 7, of which a middle part is not trained, become three."""
    plan = OptimizerPlan(
        "SGD", (Span(0, 2, {"lr": 0.1, "momentum": 0.9}), Span(4, 7, {"lr": 0.2, "momentum": 0.9})), 0.1
    )
    before = [_state(plan, shard, step) for shard, step in zip(shards(7, 2), (4, 5), strict=True)]
    after = recut(before, plan, 3)
    momenta = torch.zeros(7)
    for number, (shard, (tensors, facts)) in enumerate(zip(shards(7, 3), after, strict=True)):
        assert tensors["values"].tolist() == list(range(shard.start, shard.stop))
        assert tensors["merge.1"].tolist() == [10.0 + n for n in range(shard.start, shard.stop)]
        assert (facts["version"], facts["steps"], facts["gate"]) == (5, [5, 5], {"clocks": [5, 5]})
        for index, span in enumerate(plan.part(shard.start, shard.stop).spans):
            place = slice(shard.start + span.start, shard.start + span.stop)
            momenta[place] = tensors[f"optimizer.state.{index}.momentum_buffer"]
            assert facts["optimizer"]["shapes"][index] == [[span.stop - span.start]], number
    assert momenta.tolist() == [100.0, 101.0, 0.0, 0.0, 104.0, 105.0, 106.0]


def test_steps_that_were_left_out_go_along_with_most_of_their_shard() -> None:
    plan = OptimizerPlan("SGD", (Span(0, 12, {"lr": 0.1}),), 0.1)
    before = [_state(plan, shard, 4) for shard in shards(12, 3)]
    for number, (_, facts) in enumerate(before):
        facts["left_out"] = {"1": [[number, number + 1]]}
    assert [facts["left_out"] for _, facts in recut(before, plan, 2)] == [{"1": [[0, 1]]}, {"1": [[2, 3]]}]
    assert [facts["left_out"]["1"][0][0] for _, facts in recut(before, plan, 6)] == [0, 0, 1, 1, 2, 2]


def test_gradients_of_different_steps_are_not_mixed() -> None:
    plan = OptimizerPlan("SGD", (Span(0, 4, {"lr": 0.1}),), 0.1)
    states = [_state(plan, shard, 4) for shard in shards(4, 2)]
    for number, (tensors, facts) in enumerate(states):
        tensors["held.0"] = torch.ones(2)
        facts["held"] = [[0, 3, 3 + number, 1.0, 0.1]]
    with pytest.raises(
        RequestError, match=r"^the 2 servers .* hold gradients of different steps.*as many servers$"
    ):
        recut(states, plan, 3)


def _state(plan: OptimizerPlan, shard: slice, step: int) -> Any:
    """Gives a server's state in which every number says where it belongs."""
    own = torch.arange(float(shard.start), float(shard.stop))
    vector = own.clone()
    optimizer = plan.part(shard.start, shard.stop).build(vector)
    optimizer.step(100 + own, 0.1)
    tensors, facts = optimizer.state()
    named = {f"optimizer.{name}": value.clone() for name, value in tensors.items()}
    counts = {
        "version": step,
        "steps": [step, 5],
        "gate": {"clocks": [5, step]},
        "held": [],
        "staleness": {},
        "dropped": 0,
    }
    return {"values": own, "merge.1": 10 + own, **named}, {"optimizer": facts, "merge": {}, **counts}
