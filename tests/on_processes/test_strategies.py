"""Strategies over real processes: the same jobs as in simulation, and what happens when a process fails."""

import gc
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from conformance.jobs import (
    CLASSES,
    PARAMETERS,
    blobs,
    make_job,
    result_of,
    resumed,
    saved_vector,
    simulated,
    strategy,
    vector_of,
)
from conformance.jobs import with_dropout as with_relu
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import CheckpointSaved, Evaluated, Notice
from polyrhythm.launch.children import run_local

BIT_EQUAL = [  # inside a host sums go in rank order, at servers in their pushers', in our collectives in their own
    ("synchronous", 2),
    ("synchronous", 3),
    ("mixed(replicas=3, consistency=synchronous)", 3),
    ("synchronous(collective=ring)", 3),
    ("synchronous(transfer=bfloat16)", 3),
    ("synchronous(compress=one_bit(dense_below=0))", 3),
    ("synchronous(compress=power_sgd(rank=1, dense_below=0))", 3),
    ("d_psgd(compress=int8(dense_below=0))", 3),
    ("synchronous(compress=top_k(density=0.3, route=split, dense_below=0))", 3),
    ("synchronous(collective=two_level(group=2, between=recursive_doubling))", 4),
    ("parameter_server(servers=2, consistency=synchronous)", 3),
    ("parameter_server(servers=2, consistency=synchronous, compress=top_k(density=0.2, dense_below=0))", 3),
    ("mixed(replicas=2, consistency=synchronous)", 3),
    ("mixed(replicas=3, consistency=synchronous, inside=synchronous(collective=rabenseifner))", 3),
    ("local_sgd(steps=2, optimizer_state=average)", 2),
    ("local_sgd(steps=2, compress=int8(dense_below=0))", 3),
    ("hierarchical_averaging(steps=2, steps_between=4)", 3),
    ("hybrid(scheme=b)", 3),
    ("pipeline(stages=2, microbatches=4, schedule=gpipe)", 2),
    ("sandblaster(servers=2, portions=3)", 3),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_child_is_left():
    gc.collect()  # an error that an earlier test caught holds its run's store, which no child could tear down
    yield
    assert multiprocessing.active_children() == []


def run(job, emit=lambda event: None):
    """Runs a job in real processes; gives its events."""
    events = []

    def hear(event):
        events.append(event)
        emit(event)

    run_local(job, hear, threads=1)
    return events


def endless(spec, workers, dataset, folder, **learning):
    """Makes a job that goes on whenever it is asked to stop, at a rate that does not depend on its epochs."""
    return make_job(
        spec, workers, dataset=dataset, folder=folder, epochs=10_000, schedule="constant", **learning
    )


def of_epochs(job, epochs):
    return replace(job, learning=replace(job.learning, epochs=epochs))


@pytest.mark.parametrize(("spec", "workers"), BIT_EQUAL)
def test_in_step_real_processes_give_the_bits_of_the_simulation(spec, workers):
    decay = 0.0 if strategy(spec).traits(1).cuts_network else 0.9
    job = make_job(spec, workers, model=with_relu, weight_average=decay)
    virtual = simulated(job).result  # first here: what it imports, children need not
    events = run(job)
    real = result_of(events)
    for figure in (
        "parameters_sha256",
        "train_loss",
        "test_loss",
        "test_top1",
        "steps",
        "epochs",
        "staleness",
        "workers",
        "servers",
    ):
        assert real[figure] == virtual[figure], figure
    pays = [event.text for event in events if isinstance(event, Notice) and "it pays" in event.text]
    assert len(pays) == ("compress" in spec)


@pytest.mark.parametrize("trunk", ["channels", "height"])
def test_cut_convolutions_of_real_processes_give_the_bits_of_the_simulation(trunk):
    def model():
        return nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, CLASSES)
        )

    job = make_job(f"hybrid(trunk={trunk})", 2, model=model)
    virtual, real = simulated(job).result, result_of(run(job))
    for figure in ("parameters_sha256", "test_loss", "steps"):
        assert real[figure] == virtual[figure], figure
    # The sum over workers, a message with 64 bytes of header, goes through memory here.
    assert real["bytes_sent_per_step"] == pytest.approx(virtual["bytes_sent_per_step"] - 64, rel=1e-3)


def test_all_reduce_of_three_saves_what_the_simulation_has_and_counts_by_the_formula(tmp_path):
    job = make_job("synchronous", 3, folder=tmp_path, checkpoints=0)
    result = result_of(run(job))
    assert torch.equal(saved_vector(tmp_path), vector_of(simulated(job).models[0]))
    # 10 steps of 3 workers; no message of ours, and so no header, is counted
    all_reduced = 10 * 3 * (2 * (PARAMETERS + 2) * 4 * 2 // 3)
    assert result["bytes_sent_per_step"] * 30 == pytest.approx(all_reduced)


@pytest.mark.parametrize("spec", ["parameter_server(servers=2)", "mixed"])
def test_out_of_step_real_processes_apply_every_gradient_once(spec, tmp_path):
    job = make_job(spec, 3, dataset=blobs(train=240), folder=tmp_path, checkpoints=0, epochs=4)
    result = result_of(run(job))
    built = strategy(spec)
    applied = sum(result["staleness"]["histogram"].values())
    assert applied == 80 * built.traits(3).updates * built.traits(1).servers
    assert result["steps"] == 80
    assert result["test_top1"] > 0.6  # three classes: a third by chance
    assert torch.isfinite(saved_vector(tmp_path)).all()
    if spec != "mixed":
        assert result["bytes_sent_per_step"] == 2 * (PARAMETERS * 4 + 2 * 64)


@pytest.mark.parametrize(("spec", "workers"), [("hybrid", 3), ("pipeline", 2)])
def test_a_killed_worker_is_named_within_seconds(spec, workers, tmp_path):
    killed_at = []

    def kill(event):
        if isinstance(event, Evaluated) and not killed_at:
            [victim] = [child for child in multiprocessing.active_children() if child.name.endswith("rank 1")]
            killed_at.append(time.monotonic())
            os.kill(victim.pid, signal.SIGKILL)

    job = make_job(spec, workers, folder=tmp_path, epochs=10_000)
    with pytest.raises(RunError) as caught:
        run(job, kill)
    assert time.monotonic() - killed_at[0] < 30
    assert "worker 1 (rank 1) was killed by SIGKILL" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_killed_server_is_named_within_seconds():
    def kill(event):
        for child in multiprocessing.active_children():
            if isinstance(event, Evaluated) and child.name.endswith("rank 2"):
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(RunError, match=r"server 0 \(rank 2\) was killed by SIGKILL"):
        run(make_job("parameter_server", 2, epochs=10_000), kill)


def test_a_loss_that_is_not_finite_names_step_rank_and_rate():
    with pytest.raises(RequestError) as caught:
        run(make_job("parameter_server", 2, model=with_relu, optimizer="sgd(lr=1e20)", schedule="constant"))
    text = str(caught.value)
    assert "at step" in text
    assert "(rank " in text
    assert "learning rate 1e+20" in text
    assert "lower the learning rate" in text
    assert "\n" not in text


def test_a_run_that_was_asked_to_stop_resumes_to_the_same_bits(tmp_path):
    job = endless("synchronous", 2, blobs(train=400), tmp_path, model=with_relu)

    def ask_to_stop(event):
        if isinstance(event, Evaluated) and event.epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    events = run(job, ask_to_stop)
    assert signal.getsignal(signal.SIGTERM) == before
    assert events[-1].outcome == "interrupted"
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert saved[-1].step > 2 * 50
    assert result_of(events)["steps"] == saved[-1].step
    job = of_epochs(job, saved[-1].step // 50 + 2)
    whole = simulated(replace(job, checkpointing=replace(job.checkpointing, folder=None)))
    assert result_of(run(resumed(job)))["parameters_sha256"] == whole.sha256


def test_an_asynchronous_run_that_was_asked_to_stop_goes_on_and_applies_every_gradient_once(tmp_path):
    job = endless("parameter_server(servers=2)", 3, blobs(train=480), tmp_path)

    def ask_to_stop(event):
        if isinstance(event, Evaluated) and event.epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    events = run(job, ask_to_stop)
    assert events[-1].outcome == "interrupted"
    taken = (
        sum(result_of(events)["staleness"]["histogram"].values()) // 2
    )  # by all workers, so no one has taken more
    epochs = taken // 40 + 1
    result = result_of(run(resumed(of_epochs(job, epochs))))
    assert sum(result["staleness"]["histogram"].values()) == 40 * epochs * 3 * 2
    assert result["steps"] == 40 * epochs
