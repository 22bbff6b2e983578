"""Resuming a run: what it needs, and what has been left of one that died young or late.

died     before its first checkpoint ─▶ begins anew, in the same folder
         on the way                  ─▶ goes on from its last whole checkpoint
         after its last checkpoint   ─▶ tests and saves its model, and ends
ended    ─▶ refused
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm.config.recipe import CONFIG_FILE
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.events import RunEnded, RunStarted
from polyrhythm.reporting.event_log import LOG_FILE, read_events
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import FOLDER, Archive
from polyrhythm.training.checkpoint import checkpoints

AUTOMATIC = "auto"
"""In place of a folder to resume from: whatever there is in the folder of `out`."""


def automatic(
    out: str | Path | None, resume: str | Path | None
) -> tuple[str | Path | None, str | Path | None]:
    """Gives the folders of a new run and of one to continue, of which at most one is named, where `resume` is `auto`.

    Raises:
        RequestError: nobody says where the run would be.
    """
    if str(resume) != AUTOMATIC:
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


def check_unfinished(job: Job) -> None:
    """Checks that there is something left to do.

    Raises:
        RequestError: the run has ended, or there is nothing that it could go on from.
    """
    snapshot = Archive(job).load()
    folder = job.keeping.folder
    assert folder is not None, "a resumed run has a folder"
    if snapshot.epoch >= job.learning.epochs and _has_ended(folder):
        raise RequestError(
            f"{folder} has done its {snapshot.epoch} epochs: ask for more with --epochs to go on"
        )


def _has_ended(folder: Path) -> bool:
    log = folder / LOG_FILE
    if not log.exists():
        return True
    last = [event for event in read_events(log) if isinstance(event, RunStarted | RunEnded)][-1:]
    return any(isinstance(event, RunEnded) and event.outcome == "done" for event in last)
