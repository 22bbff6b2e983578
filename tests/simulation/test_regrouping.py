"""Workers that go in step lose some of their number, and get them back, at every moment of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.nn import functional

from conformance.jobs import blobs, make_job, perceptron, result_of, with_batch_norm
from polyrhythm.data.dealing import batch_indices, epoch_order
from polyrhythm.errors import RunError
from polyrhythm.roles import replica
from polyrhythm.roles.job import FaultTolerance
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.allreduce.synchronous import BucketwiseUpdate
from polyrhythm.training.flat_optimizer import UndoLog
from polyrhythm.training.flat_parameters import FlatParameters
from sample import failures_of
from simulation.deaths import BATCH_SIZE, IMAGES, LENGTH, STEPS, WORKERS, events_of
from simulation.trying import layers, trial

WHOLE_S = 0.196  # what a run takes
MOMENTS = [round(WHOLE_S * number / 18, 5) for number in range(18)]


def trained(kills, successors=(), spec="synchronous", model=perceptron, fault_tolerance=None, folder=None):
    """Runs a job; gives its events and its final parameters."""
    job = make_job(spec, WORKERS, model=model, dataset=blobs(IMAGES), batch_size=BATCH_SIZE, folder=folder)
    models = []

    def make():
        models.append(job.make_model())
        return models[-1]

    events = events_of(
        replace(job, make_model=make, fault_tolerance=fault_tolerance or job.fault_tolerance),
        kills,
        successors,
    )
    return events, torch.cat([value.detach().flatten() for value in models[0].parameters()])


@cache
def undisturbed(model=perceptron):
    return trained([], model=model)[1]


@pytest.mark.parametrize("pause_s", [None, 0.0005, 0.03])
@pytest.mark.parametrize("at_s", MOMENTS)
def test_the_others_share_out_what_a_lost_worker_leaves_and_learn_the_same(at_s, pause_s):
    successors = [(at_s + pause_s, 1)] if pause_s is not None and at_s + pause_s < WHOLE_S else []
    events, vector = trained([(at_s, 1)], successors)
    result = result_of(events)
    assert (events[-1].outcome, result["steps"], result["images_not_seen"]) == ("done", STEPS, 0)
    assert torch.allclose(
        vector, undisturbed(), atol=1e-6
    )  # a step is the same batch, summed in another order


@pytest.mark.parametrize("spec", ["synchronous(collective=ring)", "synchronous(collective=auto)"])
def test_so_do_collectives_of_which_not_all_members_hear_a_loss(spec):
    _, vector = trained([(0.05, 1), (0.11, 2)], [(0.07, 1), (0.13, 2)], spec)
    assert torch.allclose(vector, undisturbed(), atol=1e-6)


def test_all_but_the_leader_may_be_lost_and_come_back_at_once():
    kills = [(0.03, 1), (0.031, 2), (0.06, 1), (0.09, 2)]
    events, vector = trained(kills, [(0.05, 1), (0.031, 2), (0.0601, 1)])
    assert result_of(events)["workers_lost"] >= 3  # of a successor that died before it was let in nobody knew
    assert result_of(events)["workers_joined"] >= 2
    assert torch.allclose(vector, undisturbed(), atol=1e-6)


def test_a_successor_has_batch_norm_statistics_and_momentum():
    """Plain statistics would be of another mean, and a momentum of nothing would be another step."""
    events, vector = trained([(0.05, 1)], [(0.07, 1)], model=with_batch_norm)
    assert result_of(events)["workers_joined"] == 1
    assert torch.isfinite(vector).all()


def test_rescaling_leaves_the_share_out_and_lowers_the_rate():
    """Worker 1 of 3 is lost before the first step: plain SGD on what the two others see, at two thirds of the rate."""
    events, vector = trained([(0.0, 1)], fault_tolerance=FaultTolerance(rescale=True))
    job = make_job("synchronous", WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE)
    learning, data = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    for step in range(STEPS):
        order = epoch_order(IMAGES, step // LENGTH, learning.seed)
        seen = torch.cat([batch_indices(order, step % LENGTH, worker, 3, BATCH_SIZE) for worker in (0, 2)])
        optimizer.param_groups[0]["lr"] = (
            learning.optimizer.lr * learning.schedule.factor(step, job.length) * 2 / 3
        )
        optimizer.zero_grad()
        functional.cross_entropy(model(data.images(seen)), data.labels[seen]).backward()
        optimizer.step()
    plain = torch.cat([value.detach().flatten() for value in model.parameters()])
    assert torch.allclose(vector, plain, atol=1e-6)
    shares = [len(batch_indices(torch.arange(IMAGES), step, 1, 3, BATCH_SIZE)) for step in range(LENGTH)]
    assert result_of(events)["images_not_seen"] == 2 * sum(shares)


def test_with_too_few_workers_a_run_in_step_ends_with_a_checkpoint(tmp_path):
    with pytest.raises(
        RunError, match=r"^2 of 3 workers remain, and min_workers is 3; continue with --resume"
    ):
        trained([(0.05, 1)], fault_tolerance=FaultTolerance(min_workers=3), folder=tmp_path)
    assert list((tmp_path / "checkpoints").glob("step-*.safetensors"))


@pytest.mark.parametrize("collective", ["library", "ring"])
def test_replicas_are_equal_and_every_gradient_counts_once_under_many_seeds(collective):
    assert failures_of(trial(f"synchronous(collective={collective})", workers=4, steps=6), range(40)) == ()


MEASURING = [
    "synchronous(collective=auto)",
    "synchronous(collective=auto, transfer=bfloat16)",
    "lazy_synchronous(collective=auto)",
    "local_sgd(collective=auto, steps=2)",
    "post_local_sgd(collective=auto)",
    "hierarchical_averaging(collective=auto)",
]


@pytest.mark.parametrize("spec", MEASURING)
def test_losses_that_come_sooner_than_links_are_measured_leave_time_for_steps(spec):
    """Measuring takes 180 ms here, and no formation lives longer than 30 ms; not even the first."""
    faults = "kill(rank=any, every_s=0.03, restart_after_s=0.004)"
    assert try_seeds(trial(spec, workers=4, steps=4, faults=faults), range(2)).failures == ()


def test_a_step_that_only_the_dead_had_finished_is_taken_again():
    """Rank 2 of 5 finishes step 5 and dies before it can hand it on; its successor is among those who repeat it."""
    faults = (
        "delay(probability=0.137, seconds=0.00639); kill(rank=any, every_s=0.0317, restart_after_s=0.011); "
        "delay(probability=0.263, seconds=0.00492)"
    )
    tried = try_seeds(
        trial("synchronous(collective=ring)", workers=5, steps=10, faults=faults), range(64, 66)
    )
    assert tried.failures == ()


def test_a_successor_that_comes_before_anybody_has_heard_of_the_loss_holds_nobody_up():
    often, rarely = (
        f"kill(rank=any, every_s={every_s}, restart_after_s={pause_s})"
        for every_s, pause_s in ((0.0126, 0.00403), (0.026, 0.0))
    )
    faults = f"{rarely}; {often}"
    assert failures_of(trial("synchronous", workers=3, steps=4, faults=faults), range(560, 570)) == ()


@pytest.mark.parametrize("pause_s", [None, 0.0005])
def test_layers_are_updated_one_by_one_to_the_bits_of_whole_updates(pause_s, monkeypatch):
    """A worker dies at many moments; some steps have updated a bucket or two when they break."""
    monkeypatch.setattr(replica, "FlatParameters", partial(FlatParameters, bucket_bytes=16))
    taken_back = []
    restore = UndoLog.restore

    def taking_back(log):
        taken_back.append(log)
        restore(log)

    monkeypatch.setattr(UndoLog, "restore", taking_back)
    for at_s in (0.05 + number * 5e-4 for number in range(12)):
        successors = [(at_s + pause_s, 1)] if pause_s is not None else []
        _, one_by_one = trained([(at_s, 1)], successors)
        with monkeypatch.context() as plainly:
            plainly.setattr(BucketwiseUpdate, "fits", lambda plan, mean: False)
            events, whole = trained([(at_s, 1)], successors)
        assert result_of(events)["workers_lost"] == 1
        assert torch.equal(one_by_one, whole)
    assert len(taken_back) > 4


def test_what_is_not_taken_back_is_found(monkeypatch):
    tried = layers("synchronous", faults="kill(rank=any, every_s=0.05, restart_after_s=0.01)")
    assert try_seeds(tried, range(6)).failures == ()
    monkeypatch.setattr(UndoLog, "restore", lambda self: None)
    assert try_seeds(tried, range(6)).failures != ()
