"""Checkpoints at any step: a run resumed inside an epoch ends like one that was not interrupted."""

from dataclasses import replace

import pytest

from conformance.jobs import (
    UNEVEN,
    blobs,
    in_step,
    make_job,
    named,
    out_of_step,
    played,
    resumed,
    simulated,
    strategy,
    with_dropout_and_batch_norm,
)
from polyrhythm.errors import RequestError
from polyrhythm.events import CheckpointSaved, WorkerLost
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.checkpoint import best_checkpoint, checkpoints, load_checkpoint
from simulation import lost_leaders
from simulation.deaths import events_of

WORKERS = 3
STEPS = 10
"""Of two epochs of 53 images, 12 a step."""


def saving(job, every, folder, **more):
    kept = replace(job.checkpointing, folder=folder, checkpoints=99, every=Interval.parse(every), **more)
    return replace(job, checkpointing=kept)


def saved_steps(folder):
    return sorted(load_checkpoint(path)[1]["step"] for path in checkpoints(folder / FOLDER))


@pytest.mark.parametrize("spec", named(in_step(WORKERS)))
def test_in_step_a_run_resumed_from_any_checkpoint_has_the_same_bits(spec, tmp_path):
    whole = played(spec, WORKERS, model=with_dropout_and_batch_norm)
    job = saving(make_job(spec, WORKERS, model=with_dropout_and_batch_norm), "2steps", tmp_path)
    trained = simulated(job, UNEVEN)
    assert trained.sha256 == whole.sha256, "saving has changed the run"
    steps = saved_steps(tmp_path)
    traits = strategy(spec).traits(WORKERS)
    if traits.exchange_every == 1:
        assert steps == [2, 4, 6, 8, STEPS]
    if traits.exchange_every <= STEPS // 2:  # at most one a round
        assert any(step % (STEPS // 2) > 0 for step in steps), "no checkpoint inside an epoch"
    for path in checkpoints(tmp_path / FOLDER):
        again = simulated(resumed(job), UNEVEN)
        assert again.sha256 == whole.sha256, path.name
        assert again.result["test_loss"] == whole.result["test_loss"]
        for newer in checkpoints(tmp_path / FOLDER):
            if newer.name >= path.name:
                newer.unlink()


@pytest.mark.parametrize("spec", named(out_of_step(WORKERS)))
def test_out_of_step_a_run_resumed_inside_an_epoch_applies_every_gradient_once(spec, tmp_path):
    job = saving(make_job(spec, WORKERS, dataset=blobs(train=48)), "3steps", tmp_path)
    not_seen = simulated(job, UNEVEN).result["images_not_seen"]  # by the rule of backup_workers
    traits = strategy(spec).traits(WORKERS)
    tellers = traits.shards or (1 if traits.servers else WORKERS)
    found = checkpoints(tmp_path / FOLDER)
    assert len(found) >= 2
    for path in found:
        again = simulated(resumed(job), UNEVEN)
        assert again.events[-1].outcome == "done"
        assert sum(again.result["staleness"]["histogram"].values()) == 8 * traits.gradients * tellers, (
            path.name
        )
        assert (again.result["images_not_seen"] > 0) == (not_seen > 0)
        for newer in checkpoints(tmp_path / FOLDER):
            if newer.name >= path.name:
                newer.unlink()


@pytest.mark.parametrize("spec", ["ad_psgd", "parameter_server", "mixed(replicas=2)", "easgd"])
def test_out_of_step_a_checkpoint_holds_the_state_of_every_worker(spec, tmp_path):
    """Also of one that is slower than the interval, and has sent none before."""
    slow = ConstantCluster(step_s=lambda worker: 0.01 if worker == 0 else 0.035)
    simulated(saving(make_job(spec, WORKERS, epochs=3), "2steps", tmp_path), slow)
    for path in checkpoints(tmp_path / FOLDER):
        workers = load_checkpoint(path)[1]["workers"]
        assert {int(worker) for worker in workers} == set(range(WORKERS)), path.name


@pytest.mark.parametrize(
    "spec", ["synchronous", "local_sgd(steps=2)", "parameter_server", "ad_psgd", "mixed(replicas=2)"]
)
@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_an_interval_in_time_is_one_in_step_where_workers_are(spec, latency_s, tmp_path):
    around = ConstantCluster(step_s=lambda worker: 0.01 * (1 + 0.37 * worker), latency_s=latency_s)
    job = saving(make_job(spec, WORKERS, epochs=6), "0.07s", tmp_path)
    whole = simulated(make_job(spec, WORKERS, epochs=6), around)
    trained = simulated(job, around)
    times = [event.time_s for event in trained.events if isinstance(event, CheckpointSaved)]
    assert len(times) > 2
    steps = saved_steps(tmp_path)
    assert steps[0] > 0
    assert any(step % (steps[-1] // 6) for step in steps), "no checkpoint inside an epoch"
    if not strategy(spec).traits(WORKERS).lockstep:
        return
    assert trained.sha256 == whole.sha256
    for path in checkpoints(tmp_path / FOLDER):
        assert simulated(resumed(job), around).sha256 == whole.sha256
        for newer in checkpoints(tmp_path / FOLDER):
            if newer.name >= path.name:
                newer.unlink()


@pytest.mark.parametrize(
    "spec", ["synchronous", "local_sgd(steps=2)", "parameter_server", "ad_psgd", "mixed(replicas=2)"]
)
def test_a_worker_that_fails_holds_up_no_checkpoint(spec, tmp_path):
    job = saving(make_job(spec, WORKERS, epochs=4), "2steps", tmp_path)
    for at_s in (0.034, 0.0505, 0.061):
        events = events_of(job, [(at_s, 1)], [(at_s + 0.01, 1)])
        saved = [event for event in events if isinstance(event, CheckpointSaved)]
        assert events[-1].outcome == "done"
        assert sum(event.time_s > at_s for event in saved) > 2
        assert any(isinstance(event, WorkerLost) for event in events)
        for path in checkpoints(tmp_path / FOLDER)[1:3]:
            steps = {entry["account"]["step"] for entry in load_checkpoint(path)[1]["workers"].values()}
            assert len(steps) == 1 or not strategy(spec).traits(WORKERS).lockstep


def test_an_interval_that_cannot_be_read_is_one_line():
    for text in ("", "10", "steps", "0steps", "1.5steps", "-3min", "4 fortnights"):
        with pytest.raises(RequestError, match="write 100steps, 10min"):
            Interval.parse(text)
    assert str(Interval.parse("2 h")) == "7200s"
    assert Interval.parse("1step") == Interval.parse("1 steps")


def test_an_interval_of_epochs_leaves_the_ends_of_others_out(tmp_path):
    job = saving(make_job("synchronous", WORKERS, epochs=5), "2epochs", tmp_path)
    simulated(job)
    assert saved_steps(tmp_path) == [10, 20, 25]


def test_a_checkpoint_that_was_tested_is_kept_as_the_best_at_any_interval(tmp_path):
    simulated(saving(make_job("synchronous", WORKERS, epochs=3), "2steps", tmp_path, best=True))
    best = best_checkpoint(tmp_path / FOLDER)
    assert best is not None
    assert load_checkpoint(best)[1]["step"] % (STEPS // 2) == 0


@pytest.mark.parametrize("every", ["1steps", "3s"])
@pytest.mark.parametrize("spec", ["synchronous", "local_sgd(steps=2)", "parameter_server"])
def test_a_replacement_of_worker_0_saves_at_the_same_interval(spec, every, tmp_path):
    job = saving(lost_leaders.job_of(spec, epochs=4), every, tmp_path)
    events = lost_leaders.events_of(job, "kill(rank=0, at_s=6.3, restart_after_s=0.5)")
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert events[-1].outcome == "done"
    assert any(isinstance(event, WorkerLost) and event.worker == 0 for event in events)
    assert any(8 < step < 16 and step % lost_leaders.LENGTH for step in saved)
    newest = checkpoints(tmp_path / FOLDER)[1]
    checkpoints(tmp_path / FOLDER)[0].unlink()
    again = simulated(resumed(job))
    assert again.events[-1].outcome == "done", newest
    if strategy(spec).traits(WORKERS).lockstep:
        assert again.sha256 == events[-1].result["parameters_sha256"]


@pytest.mark.parametrize(
    "spec", ["synchronous", "local_sgd(steps=2)", "parameter_server(consistency=synchronous)"]
)
@pytest.mark.parametrize("every", ["1step", "0.03s"])
def test_a_stop_while_states_are_collected_saves_the_last_step(spec, every, tmp_path):
    whole = played(spec, WORKERS)
    for number in range(6):
        job = saving(make_job(spec, WORKERS), every, tmp_path / str(number))
        slow = ConstantCluster(step_s=UNEVEN.step_s, latency_s=0.004, stop_at_s=0.05 + 0.017 * number)
        first = simulated(job, slow)
        assert first.checkpoint_steps[-1] == first.result["steps"]
        assert simulated(resumed(job), UNEVEN).sha256 == whole.sha256
