"""Runs that go on with another strategy than the one that they began with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import blobs, make_job, named, perceptron, resumed, simulated, strategies, strategy
from polyrhythm.errors import RequestError
from polyrhythm.events import CheckpointSaved, Notice, WorkerProgress
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.roles.job import Job
from polyrhythm.simulation.simulated_run import ConstantCluster
from polyrhythm.training.checkpoint import checkpoints

WORKERS, IMAGES, BATCH_SIZE = 4, 53, 4


def job_of(spec: str, workers: int = WORKERS, **options: Any) -> Job:
    chosen = {"optimizer": "sgd(lr=0.05, momentum=0.9)", "epochs": 2} | options
    job = make_job(spec, workers, dataset=blobs(IMAGES), batch_size=BATCH_SIZE, **chosen)
    return replace(job, draws=job.traits.draws)


def first_epochs(job: Job, epochs: int) -> Job:
    """Gives the job that ends after its first epochs, as one of a longer run."""
    return replace(job, learning=replace(job.learning, epochs=epochs, all_epochs=job.learning.epochs))


def handed(job: Job, spec: str, workers: int | None = None) -> Job:
    changed = replace(resumed(job), strategy=strategy(spec), workers=workers or job.workers)
    return replace(changed, draws=changed.traits.draws)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.05, momentum=0.9)", "adam", "adagrad"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("synchronous", "parameter_server(servers=3, consistency=synchronous)"),
        ("parameter_server(servers=2, consistency=synchronous)", "synchronous"),
        ("parameter_server(servers=2, consistency=synchronous)", "hierarchical(groups=2)"),
        ("lazy_synchronous", "mixed(replicas=2, consistency=synchronous, servers=2)"),
        ("mixed(replicas=2, consistency=synchronous)", "synchronous(collective=ring)"),
        ("mixed(replicas=2, consistency=synchronous)", "lazy_synchronous"),
    ],
)
def test_what_computes_the_same_goes_on_as_if_nothing_had_changed(
    before: str, after: str, optimizer: str, tmp_path: Path
) -> None:
    """Momenta, schedule, order of images and counts go along: the same numbers, up to the order of sums."""
    job = job_of(before, optimizer=optimizer, folder=tmp_path, epochs=3)
    whole = simulated(job_of("synchronous", optimizer=optimizer, epochs=3))
    simulated(first_epochs(job, 1))
    found = simulated(handed(job, after))
    assert torch.allclose(vector(found.models[0]), vector(whole.models[0]), atol=1e-5)
    assert (found.result["steps"], found.result["epochs"]) == (whole.result["steps"], 3)
    (notice,) = [event.text for event in found.events if isinstance(event, Notice)]
    was, now = strategy(before), strategy(after)
    assert notice == f"{now} continues from the model of {was} after 1 epoch, with its optimizer's state"


def refuses(spec: str) -> str:
    """Why a strategy cannot train this job."""
    try:
        strategy(spec).check(WORKERS)
    except RequestError as error:
        return str(error)
    return ""


POSSIBLE = [spec for spec in strategies() if not refuses(spec)]


@pytest.mark.parametrize("spec", named(POSSIBLE))
def test_every_strategy_goes_on_with_the_model_of_another(spec: str, tmp_path: Path) -> None:
    """After an epoch in which nothing is learned, the model is that of the strategy before, whatever held it."""
    optimizer = "sgd(lr=0.05, momentum=0)"
    job = job_of("synchronous", optimizer=optimizer, folder=tmp_path)
    before = simulated(first_epochs(job, 1)).result
    still = handed(job, spec)
    still = replace(still, learning=replace(still.learning, optimizer=_still(still)))
    found = simulated(still)
    assert found.result["test_loss"] == pytest.approx(before["test_loss"], rel=1e-5)
    assert found.result["epochs"] == 2


def _still(job: Job) -> Any:
    return job.learning.optimizer.model_copy(update={"lr": 1e-12})


def test_an_outer_optimizer_neither_takes_nor_leaves_momenta(tmp_path: Path) -> None:
    """The learners' optimizer is the one that continues; changes of models have other momenta than gradients."""
    job = job_of("synchronous", folder=tmp_path / "there")
    before = simulated(first_epochs(job, 1)).result
    still = handed(job, "decoupled_diloco(steps=2)")
    found = simulated(replace(still, learning=replace(still.learning, optimizer=_still(still))))
    assert found.result["test_loss"] == pytest.approx(before["test_loss"], rel=1e-5)
    job = job_of("decoupled_diloco(steps=2)", optimizer="adam", folder=tmp_path / "back")
    simulated(first_epochs(job, 1))
    back = simulated(handed(job, "synchronous"))
    (notice,) = [event.text for event in back.events if isinstance(event, Notice)]
    assert notice.endswith("after 1 epoch, with its optimizer's state")


@pytest.mark.parametrize("spec", named(POSSIBLE))
def test_every_strategy_leaves_its_model_to_the_next(spec: str, tmp_path: Path) -> None:
    if spec == "decoupled_diloco":
        spec += "(steps=2)"  # servers have the model once it is merged
    job = job_of(spec, optimizer="sgd(lr=0.05, momentum=0)", folder=tmp_path)
    before = simulated(first_epochs(job, 1)).result
    last = handed(job, "synchronous", workers=2)
    found = simulated(replace(last, learning=replace(last.learning, optimizer=_still(last))))
    # A model that is only made at the very end, of rounds or blocks, may be a little another.
    assert found.result["test_loss"] == pytest.approx(before["test_loss"], rel=0.25)
    assert found.result["epochs"] == 2


def test_the_rest_of_an_epoch_is_dealt_out(tmp_path: Path) -> None:
    job = job_of("synchronous", folder=tmp_path)
    begun = simulated(job, ConstantCluster(stop_at_s=0.015))
    left = IMAGES - sum(event.images for event in begun.events if isinstance(event, WorkerProgress))
    found = simulated(handed(job, "local_sgd(steps=2)", workers=3))
    (notice,) = [event.text for event in found.events if isinstance(event, Notice)]
    assert notice == (
        "local_sgd(steps=2) continues from the model of synchronous after 0 epochs, with its optimizer's state, with 3 "
        f"workers in place of 4; the {left} remaining images of epoch 1 are divided among them"
    )


def test_images_that_were_shared_out_are_not_drawn(tmp_path: Path) -> None:
    job = job_of("synchronous", folder=tmp_path)
    simulated(job, ConstantCluster(stop_at_s=0.015))
    with pytest.raises(
        RequestError, match=r"^epoch 1 is unfinished, .* to the end of an epoch, or give --batches"
    ):
        simulated(handed(job, "parameter_server"))


@pytest.mark.parametrize(
    ("before", "after", "draws"),
    [
        ("easgd", "synchronous", False),
        ("easgd", "easgd", False),
        ("parameter_server", "downpour", True),
        ("parameter_server", "parameter_server", True),
    ],
)
def test_a_crashed_run_counts_what_is_taken_again_once(
    before: str, after: str, draws: bool, tmp_path: Path
) -> None:
    """The slow worker's steps come after the checkpoint, and the others have trained on: all of it is done again."""
    job = replace(job_of(before, folder=tmp_path, checkpoints=9, epochs=3), draws=draws)
    uneven = ConstantCluster(step_s=lambda worker: 2.5 if worker == 3 else 1.0)
    stated = simulated(job, uneven).events
    saved = [place for place, event in enumerate(stated) if isinstance(event, CheckpointSaved)]
    for path in checkpoints(tmp_path / FOLDER)[:-1]:
        path.unlink()
    last = replace(resumed(job), strategy=strategy(after))
    found = simulated(last, uneven)
    figures = RunFigures.of([*stated[: saved[1]], *found.events])
    assert figures.images_seen + found.result["images_not_seen"] == 3 * IMAGES


def test_another_optimizer_begins_anew(tmp_path: Path) -> None:
    job = job_of("synchronous", folder=tmp_path)
    simulated(first_epochs(job, 1))
    last = handed(job_of("synchronous", folder=tmp_path, optimizer="adam"), "local_sgd")
    (notice,) = [event.text for event in simulated(last).events if isinstance(event, Notice)]
    assert notice.endswith("after 1 epoch, without an optimizer's state")


def test_schedules_follow_the_whole_run() -> None:
    rates: dict[int, Callable[[int], float]] = {}
    for epochs in (1, 3):
        job = job_of("synchronous", epochs=3)
        part = first_epochs(job, epochs) if epochs < 3 else job
        rates[epochs] = lambda step, part=part: part.learning.schedule.factor(step, part.length)  # type: ignore[misc]
    assert [rates[1](step) for step in range(4)] == [rates[3](step) for step in range(4)]
    assert job_of("synchronous", model=perceptron).planned.learning.epochs == 2
