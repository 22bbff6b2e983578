"""A run whose processes are all killed while a checkpoint inside an epoch is written resumes from the one before."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.jobs import blobs, make_job, result_of, resumed, simulated, strategy
from polyrhythm.events import CheckpointSaved, Event, RunStarted
from polyrhythm.launch.children import run_local
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing import archive
from polyrhythm.roles.job import Job
from polyrhythm.training import checkpoint
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint

WORKERS, EPOCHS = 2, 3
IMAGES = 80
"""Ten steps an epoch of two workers with four images each."""


def killed_while_saving(job: Job, step: int, moment: str) -> None:
    """Trains in a process group of its own, which ends while the first checkpoint from a step on is written."""
    os.setpgid(0, 0)
    save, write = archive.save_checkpoint, checkpoint.write_safetensors

    def end(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)
        signal.pause()

    def half(file: object, *_: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        file.flush()  # type: ignore[attr-defined]
        end()

    def save_and_end(path: Path, tensors: object, facts: dict[str, int], claim: object) -> object:
        due = facts["step"] >= step and len(checkpoints(path.parent)) > 0
        checkpoint.write_safetensors = half if due and moment == "half written" else write
        if due and moment == "to be renamed":
            checkpoint.flush = end  # type: ignore[assignment]
        found = save(path, tensors, facts, claim)  # type: ignore[arg-type]
        if due and moment == "written":
            end()
        return found

    archive.save_checkpoint = save_and_end  # type: ignore[assignment]
    run_local(job, lambda event: None, threads=1)


@pytest.mark.parametrize(
    ("spec", "moment"),
    [
        ("synchronous", "half written"),
        ("synchronous", "to be renamed"),
        ("synchronous", "written"),
        ("local_sgd(steps=2)", "half written"),
        ("parameter_server(consistency=synchronous)", "to be renamed"),
        ("parameter_server", "half written"),
        ("easgd", "written"),
        ("ad_psgd", "half written"),
        ("mixed(replicas=1)", "to be renamed"),
        ("mixed(replicas=1, consistency=synchronous)", "half written"),
    ],
)
def test_killed_at_any_moment_it_resumes_from_a_whole_one(spec: str, moment: str, tmp_path: Path) -> None:
    job = make_job(spec, WORKERS, dataset=blobs(IMAGES), folder=tmp_path, epochs=EPOCHS)
    job = replace(job, checkpointing=replace(job.checkpointing, every=Interval.parse("3steps")))
    process = multiprocessing.get_context("fork").Process(target=killed_while_saving, args=(job, 6, moment))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    begins_at = load_checkpoint(checkpoints(tmp_path / archive.FOLDER)[0])[1]["step"]
    events: list[Event] = []
    run_local(resumed(job), events.append, threads=1)
    assert events[-1].outcome == "done"  # type: ignore[attr-defined]
    started = next(event for event in events if isinstance(event, RunStarted))
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    if started.start_step < started.steps:
        assert begins_at < saved[0]
    else:  # a slow disk leaves checkpoints out, and servers' states may follow the last push of a free-running worker
        assert moment == "written" or not strategy(spec).traits(WORKERS).lockstep
    result = result_of(events)
    assert result["images_not_seen"] == 0
    if strategy(spec).traits(WORKERS).lockstep:
        whole = simulated(make_job(spec, WORKERS, dataset=blobs(IMAGES), epochs=EPOCHS))
        assert result["parameters_sha256"] == whole.sha256
        assert begins_at > 0
