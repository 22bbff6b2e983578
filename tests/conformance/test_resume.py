"""A run that was interrupted and goes on: where workers go in step, to the same bits as if nothing had happened."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from conformance.jobs import (
    OPTIMIZERS,
    UNEVEN,
    blobs,
    cuts_layers,
    in_step,
    make_job,
    named,
    out_of_step,
    perceptron,
    plain_alone,
    plainly,
    played,
    resumed,
    sha256_of,
    simulated,
    stop_at,
    strategies,
    strategy,
    vector_of,
    with_dropout,
    with_dropout_and_batch_norm,
)
from polyrhythm.errors import RequestError
from polyrhythm.events import RunStarted
from polyrhythm.roles.checkpointing.archive import FOLDER, Archive
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import choices
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint

WORKERS = 3
STEPS_PER_EPOCH = 5  # 53 images, 12 a step


@pytest.fixture
def folders(tmp_path):
    """Gives new folders."""
    numbers = iter(range(100))

    def make():
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return folder

    return make


def test_a_run_that_has_done_more_epochs_than_are_asked_for_ends_at_once(tmp_path):
    whole = simulated(make_job("synchronous", 2, folder=tmp_path, epochs=3))
    fewer = simulated(resumed(make_job("synchronous", 2, folder=tmp_path, epochs=1)))
    assert (fewer.events[-1].outcome, fewer.sha256) == ("done", whole.sha256)


def one_by_one(spec):
    """Tells whether every gradient is an update of its own."""
    return strategy(spec).traits(WORKERS).updates == strategy(spec).traits(WORKERS).gradients


def interrupted_and_resumed(job, folder, stop_s):
    """Stops a job at a virtual time and takes it up again; gives both halves."""
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=folder))
    first = simulated(kept, stop_at(stop_s))
    if first.events[-1].outcome == "done":
        return first, first
    return first, simulated(resumed(kept), UNEVEN)


@pytest.mark.parametrize("spec", in_step(WORKERS))
def test_in_step_a_resumed_run_has_the_same_bits_wherever_it_stopped(spec, folders):
    job = make_job(spec, WORKERS)
    whole = played(spec, WORKERS)
    stopped_at = set()
    for stop_s in (0.0, 0.0265, 0.044, 0.0615, 0.0965, 0.1315):
        first, second = interrupted_and_resumed(job, folders(), stop_s)
        assert second.events[-1].outcome == "done"
        assert second.sha256 == whole.sha256, stop_s
        stopped_at.add(first.checkpoint_steps[-1])
        if strategy(spec).traits(WORKERS).exchange_every == 1:
            done = (
                first.checkpoint_steps[-1] == 2 * STEPS_PER_EPOCH
            )  # gossip's word of the wish takes some steps
            assert first.events[-1].outcome == ("done" if done else "interrupted")
    if strategy(spec).traits(WORKERS).exchange_every == 1:
        assert STEPS_PER_EPOCH in stopped_at
        assert len(stopped_at) > 3
    assert len(stopped_at) > 1


THIRDS = [
    (spec, optimizer)
    for number, spec in enumerate(plain_alone())
    for place, optimizer in enumerate(choices(OPTIMIZERS))
    if (number + place) % 3 == 0
]
"""Each strategy with a third of the optimizers, each optimizer with a third of the strategies: what there is to be kept
is the optimizer's, and where it is kept the strategy's."""


@pytest.mark.parametrize(("spec", "optimizer"), THIRDS)
def test_one_worker_resumes_with_all_state_of_every_optimizer(spec, optimizer, folders):
    job = make_job(spec, optimizer=optimizer, batch_size=8)  # one worker repeats itself, in step or not
    if cuts_layers(job):
        with pytest.raises(RequestError, match="looks at whole layers"):
            simulated(job)
        return
    _, second = interrupted_and_resumed(job, folders(), 0.043)
    assert torch.equal(vector_of(second.models[0]), plainly(optimizer=optimizer, batch_size=8))


@pytest.mark.parametrize(
    ("spec", "stop_s"),
    [
        (spec, stop_s)
        for number, spec in enumerate(out_of_step(WORKERS))
        for stop_s in ((0.004, 0.058), (0.031, 0.085))[number % 2]
    ],
)
def test_out_of_step_every_gradient_is_applied_exactly_once(spec, stop_s, folders):
    job = make_job(spec, WORKERS, dataset=blobs(train=48))  # 4 full steps an epoch
    first, second = interrupted_and_resumed(job, folders(), stop_s)
    built = strategy(spec)
    if (
        built.traits(WORKERS).exchange_every == 1
    ):  # else there may be no exchange left at which to hear of the wish
        assert first.events[-1].outcome == "interrupted"
    assert second.events[-1].outcome == "done"
    applied = sum(second.result["staleness"]["histogram"].values())
    traits = built.traits(WORKERS)
    tellers = traits.shards or (
        1 if traits.servers else WORKERS
    )  # without servers every worker tells its own
    assert applied == 8 * traits.gradients * tellers
    assert second.sha256 == sha256_of(vector_of(second.models[0]))


@pytest.mark.parametrize(
    "spec",
    [spec for spec in out_of_step(WORKERS) if one_by_one(spec) and strategy(spec).traits(WORKERS).servers],
)
def test_an_asynchronous_checkpoint_holds_all_state(spec, folders):
    folder = folders()
    simulated(make_job(spec, WORKERS, folder=folder, optimizer="adam"), stop_at(0.058))
    tensors, facts = load_checkpoint(checkpoints(folder / FOLDER)[0])
    servers = strategy(spec).traits(WORKERS).servers
    assert len(facts["servers"]) == servers
    assert sum(tensors[f"server.{index}.values"].numel() for index in range(servers)) == 103
    for index, server in enumerate(facts["servers"]):
        assert server["version"] == sum(server["staleness"].values()) == sum(server["steps"])
        assert tensors[f"server.{index}.optimizer.state.0.step"] == server["version"]
        for moment in ("exp_avg", "exp_avg_sq"):
            shape = tensors[f"server.{index}.optimizer.state.0.{moment}"].shape
            assert shape == tensors[f"server.{index}.values"].shape
    assert {int(worker) for worker in facts["workers"]} == set(range(WORKERS))


@pytest.mark.parametrize(
    ("spec", "stop_s"), [(spec, (0.03, 0.075)[number % 2]) for number, spec in enumerate(in_step(WORKERS))]
)
def test_random_numbers_and_every_workers_own_statistics_are_back_after_a_resume(spec, stop_s, folders):
    """Dropout draws the same, and batch normalization goes on from each worker's own running means."""
    job = make_job(spec, WORKERS, model=with_dropout_and_batch_norm)
    whole = played(spec, WORKERS, model=with_dropout_and_batch_norm)
    _, second = interrupted_and_resumed(job, folders(), stop_s)
    assert second.sha256 == whole.sha256
    for expected, found in zip(whole.models, second.models, strict=True):
        for name, value in expected.named_buffers():
            assert torch.equal(dict(found.named_buffers())[name], value), name
    assert second.result["test_loss"] == whole.result["test_loss"]


@pytest.mark.parametrize(
    "spec", [spec for spec in named(in_step(WORKERS)) if not strategy(spec).traits(WORKERS).cuts_network]
)
def test_the_weight_average_survives_a_resume(spec, folders):
    whole_folder, folder = folders(), folders()
    job = make_job(spec, WORKERS, weight_average=0.9)
    whole = simulated(replace(job, checkpointing=replace(job.checkpointing, folder=whole_folder)), UNEVEN)
    _, second = interrupted_and_resumed(job, folder, 0.07)
    expected, found = (load_file(each / "model.safetensors") for each in (whole_folder, folder))
    assert set(expected) == set(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert second.sha256 == whole.sha256


@pytest.mark.parametrize("spec", named(strategies()))
def test_a_longer_run_goes_on_from_the_last_epoch_of_a_shorter_one(spec, folders):
    folder = folders()
    simulated(make_job(spec, WORKERS, folder=folder, schedule="constant", epochs=1))
    second = simulated(resumed(make_job(spec, WORKERS, folder=folder, schedule="constant", epochs=2)))
    started = next(event for event in second.events if isinstance(event, RunStarted))
    assert started.start_epoch in ((1,) if strategy(spec).traits(WORKERS).lockstep else (0, 1))
    if strategy(spec).traits(WORKERS).lockstep:
        assert second.sha256 == simulated(make_job(spec, WORKERS, schedule="constant", epochs=2)).sha256


def test_a_checkpoint_of_another_job_is_refused(folders):
    folder = folders()
    simulated(make_job("synchronous", 2, folder=folder))
    for other, words in [
        (make_job("synchronous", 2, folder=folder, seed=4), "seed 3, not 4"),
        (make_job("synchronous", 2, folder=folder, batch_size=5), "batch size 4, not 5"),
        (make_job("synchronous", 2, folder=folder, model=with_dropout), "model perceptron, not with_dropout"),
        (make_job("synchronous", 2, folder=folder, optimizer="adam"), "optimizer sgd, not adam"),
    ]:
        with pytest.raises(RequestError, match=f"was trained with {words}: resume with that"):
            simulated(resumed(other))


def test_only_the_newest_checkpoints_stay(folders):
    folder = folders()
    job = make_job("synchronous", 1, folder=folder, epochs=4, model=perceptron)
    trained = simulated(job)
    assert trained.checkpoint_steps == [14, 28, 42, 56]
    assert sorted(path.name for path in (folder / FOLDER).iterdir()) == [
        "step-00000042.safetensors",
        "step-00000056.safetensors",
    ]
    assert Archive(job).load().step == 56


def test_a_folder_without_a_checkpoint_is_refused(folders):
    folder = folders()
    with pytest.raises(RequestError, match=r"there is no checkpoint in .*: start a new run"):
        simulated(resumed(make_job("synchronous", 1, folder=folder)))


def leader_is_late(worker: int) -> float:
    """Step times with which the others are through when worker 0 has still an epoch to go, unless they wait for it."""
    return 0.03 if worker == 0 else 0.01


@pytest.mark.parametrize("spec", out_of_step(WORKERS))
def test_a_run_is_resumed_from_a_checkpoint_in_which_others_were_through(spec, folders):
    job = make_job(spec, WORKERS, folder=folders())
    simulated(job, ConstantCluster(step_s=leader_is_late))
    checkpoints(job.checkpointing.folder / FOLDER)[0].unlink()
    second = simulated(resumed(job), ConstantCluster(step_s=leader_is_late))
    assert second.events[-1].outcome == "done"
    assert second.result["epochs"] == 2
