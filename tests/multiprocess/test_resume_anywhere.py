"""A run that is killed again and again, another rank at another moment, ends with the bits of one that never was."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from conformance.jobs import blobs, make_job, result_of, simulated, strategy
from polyrhythm.errors import RunError
from polyrhythm.events import Event
from polyrhythm.launch.children.local import run_local
from polyrhythm.roles.world import goes_on_without
from polyrhythm.strategies.cast import cast_in_order
from polyrhythm.training.saving.checkpoint import checkpoints

WORKERS = 3


@pytest.mark.parametrize("spec", ["parameter_server(servers=2, consistency=synchronous)", "d_psgd"])
def test_the_bits_are_those_of_a_run_that_was_never_killed(spec: str, tmp_path: Path) -> None:
    job = make_job(spec, WORKERS, dataset=blobs(train=120), folder=tmp_path, epochs=8)
    whole = simulated(replace(job, keeping=replace(job.keeping, folder=None)))
    cast = cast_in_order(WORKERS, strategy(spec).server_count)
    needed = [rank for rank in reversed(range(cast.size)) if not goes_on_without(rank, cast, strategy(spec))]
    steps = []
    for number, rank in zip((1, 6, 11, 9), cycle(needed), strict=False):
        heard: list[Event] = []

        def hear(event: Event) -> None:
            heard.append(event)  # noqa: B023
            if len(heard) == number:  # noqa: B023
                [victim] = [
                    child
                    for child in multiprocessing.active_children()
                    if child.name.endswith(f"rank {rank}")  # noqa: B023
                ]
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)

        keeping = replace(job.keeping, resume=bool(checkpoints(tmp_path / "checkpoints")))
        with pytest.raises(RunError, match=rf"\(rank {rank}\) was killed by SIGKILL"):
            run_local(replace(job, keeping=keeping), hear, threads=1)
        steps += [path.name for path in checkpoints(tmp_path / "checkpoints")[:1]]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1  # it got on in between
    events: list[Event] = []
    run_local(replace(job, keeping=replace(job.keeping, resume=True)), events.append, threads=1)
    assert result_of(events)["parameters_sha256"] == whole.sha256
