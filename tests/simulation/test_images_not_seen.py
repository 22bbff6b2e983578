"""What late and broken gradients cost: the images that no update has seen are counted."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.jobs import batch, blobs, make_job, result_of, simulated
from polyrhythm.roles.job import Job
from polyrhythm.roles.result import images_of_lost
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import ConstantCluster, simulate_on
from polyrhythm.strategies.compressed_mean import CompressedMean
from polyrhythm.strategies.parameter_server.serving.rule import Applied
from polyrhythm.strategies.parameter_server.serving.shard import ShardRule
from simulation.deaths import IMAGES, STEPS, WHOLE_S, events_of
from unit.simulation.clusters import cluster

Gradients = list[tuple[int, int, int]]


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """Gives a list that fills with (shard, pusher, step) of every gradient that goes into an update."""
    found: Gradients = []
    rules: list[ShardRule] = []
    apply, resume = ShardRule.apply, ShardRule.resume

    def note(rule: ShardRule, applied: Any) -> Any:
        if not any(rule is other for other in rules):
            rules.append(rule)
        number = next(number for number, other in enumerate(rules) if other is rule)
        if isinstance(applied, Applied):
            found.extend((number, entry.pusher, entry.step) for entry in applied.batch if entry.weight > 0)
        return applied

    monkeypatch.setattr(ShardRule, "apply", lambda self, *given: note(self, apply(self, *given)))
    monkeypatch.setattr(ShardRule, "resume", lambda self, *given: note(self, resume(self, *given)))
    return found


def not_seen(job: Job, applied: Gradients, replicas: int = 1) -> float:
    """Counts the images that are in no gradient of the list, in the mean over shards."""
    per_epoch = job.steps_per_epoch
    seen = sum(
        len(batch(job, step // per_epoch, step % per_epoch, worker, job.workers)[1])
        for _, pusher, step in applied
        for worker in range(pusher * replicas, min((pusher + 1) * replicas, job.workers))
    )
    return job.learning.epochs * len(job.dataset.train) - seen / job.traits.shards


def one_is_slow(worker: int) -> float:
    return 0.01 * (1 + 0.07 * worker) if worker != 1 else 0.034


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [
        ("backup_workers(spare=1)", 1),
        ("backup_workers(spare=2, servers=2)", 1),
        ("mixed(replicas=2, consistency=backup(spare=1))", 2),
        ("hierarchical(groups=3, consistency=backup(spare=1))", 2),
    ],
)
def test_images_of_dropped_gradients_are_not_seen(spec: str, replicas: int, applied: Gradients) -> None:
    job = make_job(spec, 6, epochs=3, batch_size=2)
    result = simulated(job, ConstantCluster(step_s=one_is_slow)).result
    expected = not_seen(job, applied, replicas)
    assert expected > 0
    assert result["images_not_seen"] == round(expected)
    assert result["gradients_dropped"] > 0


@pytest.mark.parametrize("spec", ["softsync(n=2)", "ssp", "backup_workers(spare=0)"])
def test_who_drops_nothing_has_seen_everything(spec: str, applied: Gradients) -> None:
    job = make_job(spec, 4, epochs=2)
    result = simulated(job, ConstantCluster(step_s=one_is_slow)).result
    assert not_seen(job, applied) == 0
    assert (result["images_not_seen"], result["gradients_dropped"]) == (0, 0)


def test_images_of_gradients_that_are_not_finite_are_not_seen(applied: Gradients) -> None:
    job = make_job("parameter_server(consistency=asynchronous, eject_after=50)", 3, optimizer="sgd(lr=0.01)")
    where = cluster({"count": 4, "cores": 4}, faults="byzantine(rank=2, attack=nan, from_s=1, to_s=4)")
    events: list[Any] = []
    simulate_on(lay_out(where, 3, 1, job.strategy.traits(3).placement), job, events.append)
    result = result_of(events)
    assert result["gradients_not_finite"] > 0
    assert result["images_not_seen"] == not_seen(job, applied) > 0


def test_a_compressed_step_that_breaks_is_taken_again_with_all_its_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[int, float] = {}
    finish = CompressedMean.finish

    def noting(mean: CompressedMean, step: Any) -> tuple[float, bool]:
        weight, stop = finish(mean, step)
        seen[step.number] = weight  # the latest, of a step that is taken again
        return weight, stop

    monkeypatch.setattr(CompressedMean, "finish", noting)
    job = make_job("synchronous(compress=top_k(density=0.2, dense_below=0))", 3)
    for at_s in (0.3 * WHOLE_S, 0.55 * WHOLE_S):
        seen.clear()
        result = result_of(events_of(job, kills=[(at_s, 1)]))
        assert len(seen) == STEPS
        assert sum(seen.values()) * job.learning.batch_size == pytest.approx(2 * IMAGES)
        assert result["images_not_seen"] == 0


def test_a_step_that_several_under_one_number_have_lost_counts_once() -> None:
    """Worker 1 and two successors of it are lost in a round of 8 steps, after 3, 4 and 6 of them."""
    job = make_job("local_sgd(steps=8)", 2, dataset=blobs(64), epochs=1)
    missed = [(3, 1), (4, 1), (6, 1)]
    assert images_of_lost(job, missed, [(0, 3), (0, 4), (0, 6)]) == 6 * 4
