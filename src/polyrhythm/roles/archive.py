"""Checkpoints of a whole run: every rank's state in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job
from polyrhythm.roles.resharding import can_reshard, resharded, resharding_notice
from polyrhythm.roles.snapshot import Snapshot
from polyrhythm.training.checkpoint import (
    checkpoint_path,
    forget_beyond,
    latest_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
)

FOLDER = "checkpoints"


class Archive:
    """The checkpoints of a run folder.

    Args:
        job: what is trained; a checkpoint of another job is refused.

    Attributes:
        remark: what is to be said of the checkpoint that was loaded; empty if nothing is.
    """

    def __init__(self, job: Job) -> None:
        assert job.keeping.folder is not None
        self._folder: Path = job.keeping.folder / FOLDER
        self._keep = job.keeping.checkpoints
        self._job = job
        self._identity = identity(job)
        self.remark = ""

    def save(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and removes old ones; gives its path inside the run folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint_path(self._folder, snapshot.step)
        save_checkpoint(path, snapshot.tensors(), {"job": self._identity, **snapshot.facts()})
        forget_beyond(self._folder, snapshot.step)
        prune(self._folder, self._keep)
        return f"{FOLDER}/{path.name}"

    def load(self) -> Snapshot:
        """Reads the newest checkpoint.

        Raises:
            RequestError: there is none, it is damaged, or it is of another job.
        """
        path = latest_checkpoint(self._folder)
        if path is None:
            raise RequestError(f"there is no checkpoint in {self._folder}: start the run anew")
        tensors, facts = load_checkpoint(path)
        before = facts["job"]["workers"]
        resharding = before != self._job.workers and can_reshard(self._job, before)
        for key, value in self._identity.items():
            if facts["job"][key] != value and not (resharding and key == "workers"):
                raise RequestError(
                    f"{path} was trained with {key} {facts['job'][key]}, not {value}: resume with that"
                )
        snapshot = Snapshot.of(tensors, facts)
        if not resharding:
            return snapshot
        self.remark = resharding_notice(self._job, before)
        return resharded(snapshot, self._job, before)


def identity(job: Job) -> dict[str, Any]:
    """Gives what tells a job from others, JSON-able."""
    return {
        "strategy": str(job.strategy),
        "workers": job.workers,
        "data": job.dataset.name,
        "model": job.model_name,
        "optimizer": str(job.learning.optimizer),
        "batch size": job.learning.batch_size,
        "batch schedule": str(job.learning.batch_schedule),
        "seed": job.learning.seed,
    }
