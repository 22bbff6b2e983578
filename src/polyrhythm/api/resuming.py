"""Resuming a run: what it needs, and what has been left of one that died young or late.

died     before its first checkpoint ─▶ begins anew, in the same folder
         on the way                  ─▶ goes on from its last whole checkpoint
         after its last checkpoint   ─▶ tests and saves its model, and ends
ended                       ─▶ refused; where the same request is made again and again (`auto`), its figures once more
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm.api.finished import finished_run
from polyrhythm.api.observed_run import Run
from polyrhythm.config.recipe import CONFIG_FILE
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.reporting.event_log import LOG_FILE
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import FOLDER, Archive
from polyrhythm.training.saving.checkpoint import checkpoints

AUTOMATIC = "auto"
"""In place of a folder to resume from: whatever there is in the folder of `out`."""


def is_automatic(resume: str | Path | None) -> bool:
    """Whether whatever is there is to be gone on with."""
    return str(resume) == AUTOMATIC


def automatic(
    out: str | Path | None, resume: str | Path | None
) -> tuple[str | Path | None, str | Path | None]:
    """Gives the folders of a new run and of one to continue, of which at most one is named, where `resume` is `auto`.

    Raises:
        RequestError: nobody says where the run would be.
    """
    if not is_automatic(resume):
        return out, resume
    if out is None:
        raise RequestError("--resume auto looks for a run in the folder of --out: name it")
    return (None, out) if (Path(out) / CONFIG_FILE).is_file() else (out, None)


def died_young(folder: Path, config: RunConfig) -> bool:
    """Whether a run that keeps checkpoints died before it had one.

    Args:
        folder: of the run.
        config: of the run.
    """
    begun = any((folder / name).exists() for name in (LOG_FILE, "environment.json"))
    return begun and config.keep_checkpoints > 0 and not checkpoints(folder / FOLDER)


def finished(job: Job) -> Run | None:
    """Gives a run that has nothing left to do, as it ended; None if there is something.

    Raises:
        RequestError: there is nothing that it could go on from, or nobody knows how it ended.
    """
    folder = job.keeping.folder
    assert folder is not None, "a resumed run has a folder"
    run = finished_run(folder)
    if run is not None and not checkpoints(folder / FOLDER) and run.figures["epochs"] >= job.learning.epochs:
        return run  # it kept none, and needs none
    snapshot = Archive(job).load()
    if snapshot.epoch < job.learning.epochs:
        return None
    if not (folder / LOG_FILE).exists():
        raise all_done(folder, snapshot.epoch)
    return run


def all_done(folder: Path, epochs: int) -> RequestError:
    """Gives what is wrong where somebody resumes a run that has nothing left to do."""
    return RequestError(f"{folder} has done its {epochs} epochs: ask for more with --epochs to go on")
