"""Replaying a run, as the verb `replay` does it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import CONFIG_FILE, configure, read_recipe
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job, Keeping
from polyrhythm.roles.recording import Recording, read_recording, recorded_job
from polyrhythm.simulation.replay import Replay
from polyrhythm.simulation.replay import replay as play
from polyrhythm.simulation.script import Difference
from polyrhythm.strategies.cast import Cast


def replay(run: str | Path) -> dict[str, Any]:
    """Plays a run again in the simulator, with every rank hearing the others in the recorded order.

    Nothing is written to disk.

    Args:
        run: a run folder.

    Returns:
        JSON-able: `run`, `same` (bit for bit), `parameters_sha256` (`recorded` and `replayed`, the latter None if the
        replay came to no end), `messages` (played), `first_difference` (None, or where and what), `seconds`.

    Raises:
        RequestError: the folder holds no run that can be replayed.
    """
    started_at = time.perf_counter()
    folder = Path(run)
    if not (folder / CONFIG_FILE).is_file():
        raise RequestError(f"{folder} is not a run folder (it has no {CONFIG_FILE}): name the run to replay")
    recording = read_recording(folder)
    _check_whole(folder, recording)
    job = _job(folder, recording)
    with _threads(recording.threads):
        found = play(job, recording)
    return {
        "run": str(folder),
        "same": found.difference is None,
        "parameters_sha256": {
            "recorded": recording.parameters_sha256,
            "replayed": found.parameters_sha256,
        },
        "messages": found.messages,
        "first_difference": _described(found.difference, found, recording) if found.difference else None,
        "seconds": time.perf_counter() - started_at,
    }


def _check_whole(folder: Path, recording: Recording) -> None:
    if recording.resumed:
        raise RequestError(f"{folder} was resumed: only runs recorded from their first step can be replayed")
    if recording.outcome != "done":
        raise RequestError(
            f"{folder} was {recording.outcome}: who stopped when is not recorded, so it cannot be replayed"
        )


def _job(folder: Path, recording: Recording) -> Job:
    """Makes the job that was recorded; its checkpoints are off."""
    values = read_recipe(folder / CONFIG_FILE)
    for key, value in values.items():
        if str(value).startswith("<your own"):
            raise RequestError(f"{folder} was trained with {key} {value}, which only your program has")
    job = assemble(configure(values, {"device": recording.device}), Keeping())
    for key, value in recorded_job(job).items():
        if recording.job.get(key) != value:
            raise RequestError(
                f"{folder} was recorded with {key} {recording.job.get(key)}, its {CONFIG_FILE} says {value}"
            )
    return dataclasses.replace(job, ahead=0)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Computes with so many threads: sums over several are added in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _described(difference: Difference, found: Replay, recording: Recording) -> dict[str, Any]:
    return {
        "where": _where(difference, recording.cast),
        **dataclasses.asdict(difference),
        "possible_causes": _causes(found, recording),
    }


def _where(difference: Difference, cast: Cast) -> str:
    number = f"message {difference.message:,}"
    if difference.rank in cast.servers:
        return f"server {cast.servers.index(difference.rank)} (rank {difference.rank}), {number}"
    if difference.rank in cast.workers:
        return f"worker {cast.workers.index(difference.rank)} (rank {difference.rank}), {number}"
    return f"after {difference.message:,} messages"


def _causes(found: Replay, recording: Recording) -> list[str]:
    """Lists what is known to make a replay differ although nothing is wrong with the run."""
    causes = []
    if found.summed_ranks > 2:
        causes.append(
            f"sums over {found.summed_ranks} ranks, which gloo adds in the order of its ring, a replay in that of "
            "ranks: equal to rounding only"
        )
    if recording.torch != torch.__version__:
        causes.append(f"PyTorch {torch.__version__}, where the run had {recording.torch}")
    if recording.device != "cpu":
        causes.append("a GPU, whose sums may take another order each time")
    return causes
