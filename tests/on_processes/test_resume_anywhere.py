"""A run that is killed again and again, another rank at another moment, ends with the bits of one that never was."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from conformance.jobs import blobs, make_job, perceptron, result_of, simulated, strategy
from on_processes.brake import Brake
from on_processes.faults.play import process_of
from polyrhythm.errors import RunError
from polyrhythm.events import CheckpointSaved, Event
from polyrhythm.launch.children import run_local
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.training.checkpoint import checkpoints

WORKERS = 3
PAUSE_S = 1.0
"""Of a step that nobody has to take: the next run must have enough of them left."""

EPOCHS_BEFORE = {1: 0, 6: 2, 11: 3, 9: 2}
"""So many epochs of ten steps tell of so many events: in each, of every worker, a test and a checkpoint."""


def resumed_at(folder: Path) -> int:
    """Gives the step from which the next run goes on."""
    saved = checkpoints(folder / "checkpoints")
    return int(saved[0].stem.removeprefix("step-")) if saved else 0


@pytest.mark.parametrize("spec", ["parameter_server(servers=2, consistency=synchronous)", "d_psgd"])
def test_the_bits_are_those_of_a_run_that_was_never_killed(spec: str, tmp_path: Path) -> None:
    job = make_job(spec, WORKERS, dataset=blobs(train=120), folder=tmp_path, epochs=10)
    whole = simulated(replace(job, checkpointing=replace(job.checkpointing, folder=None)))
    roles = roles_in_order(WORKERS, strategy(spec).traits(WORKERS).servers)
    faults = strategy(spec).faults(WORKERS)
    needed = [rank for rank in reversed(range(roles.size)) if not faults.survives(rank, roles)]
    steps = []
    for number, rank in zip((1, 6, 11, 9), cycle(needed), strict=False):
        begun = resumed_at(tmp_path)
        brake = Brake(tmp_path / f"event-{number}", 10 * EPOCHS_BEFORE[number] + 1, PAUSE_S)
        heard: list[Event] = []
        killed: list[int] = []

        def hear(event: Event) -> None:
            heard.append(event)  # noqa: B023
            saved = any(isinstance(each, CheckpointSaved) for each in heard)  # noqa: B023
            # Checkpoints are written beside the steps, so that of an epoch may come many events later.
            if not killed and len(heard) >= number and (saved or number == 1):  # noqa: B023
                killed.append(rank)  # noqa: B023
                os.kill(process_of(rank), signal.SIGKILL)  # noqa: B023
                brake.release()  # noqa: B023

        keeping = replace(job.checkpointing, resume=begun > 0)
        braked = replace(job, checkpointing=keeping, make_model=lambda: brake.on(perceptron()))  # noqa: B023
        with pytest.raises(RunError, match=rf"\(rank {rank}\) was killed by SIGKILL"):
            run_local(braked, hear, threads=1)
        steps.append(resumed_at(tmp_path))
    assert steps == sorted(steps)
    assert len(set(steps)) > 1  # it got on in between
    events: list[Event] = []
    run_local(replace(job, checkpointing=replace(job.checkpointing, resume=True)), events.append, threads=1)
    assert result_of(events)["parameters_sha256"] == whole.sha256
