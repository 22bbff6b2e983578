"""Checkpoints of a whole run: every rank's state in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from polyrhythm.errors import RequestError, RunError
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.recutting import goes_on_from, recutting_notice
from polyrhythm.roles.keeping.resharding import resharded
from polyrhythm.roles.keeping.snapshot import Snapshot
from polyrhythm.training.saving.best_checkpoint import keep_best
from polyrhythm.training.saving.checkpoint import (
    checkpoint_path,
    checkpoints,
    forget_beyond,
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
        remarks: what is to be said of the checkpoint that was loaded.
    """

    def __init__(self, job: Job) -> None:
        assert job.keeping.folder is not None
        self._folder: Path = job.keeping.folder / FOLDER
        self._keep = job.keeping.checkpoints
        self._claim = job.keeping.claim
        self._keep_best = job.keeping.best
        self._job = job
        self._identity = identity(job)
        self.remarks: list[str] = []

    def save(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint, and removes old ones when it is whole; gives its path inside the run folder.

        Raises:
            RunError: it cannot be written; older ones are untouched.
            Superseded: the folder is another's.
        """
        path = checkpoint_path(self._folder, snapshot.step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._claim.check()
            raise RunError(f"cannot write checkpoint {path}: {error.strerror or error}") from error
        facts = {"job": self._identity, **snapshot.facts()}
        save_checkpoint(path, snapshot.tensors(), facts, self._claim)
        forget_beyond(self._folder, snapshot.step, self._claim)
        prune(self._folder, self._keep, self._claim)
        return f"{FOLDER}/{path.name}"

    def keep_best(self, step: int, top1: float) -> None:
        """Keeps the checkpoint of a step besides the newest ones, if that is wanted and it is the best so far.

        Raises:
            RunError: the system could not do so.
            Superseded: the folder is another's.
        """
        if self._keep_best:
            keep_best(checkpoint_path(self._folder, step), top1, self._claim)

    def load(self) -> Snapshot:
        """Reads the newest checkpoint that is whole; what is newer and damaged goes when the next one is written.

        Raises:
            RequestError: there is none, all are damaged, it is of another job, or its workers were others and the
                strategy needs as many.
        """
        path, tensors, facts = self._newest_whole()
        before = facts["job"]["workers"]
        resharding = before != self._job.workers
        for key, value in self._identity.items():
            served = key == "strategy" and goes_on_from(self._job, facts["job"][key])
            if facts["job"][key] != value and key != "workers" and not served:
                raise RequestError(
                    f"{path} was trained with {key} {facts['job'][key]}, not {value}: resume with that"
                )
        snapshot = Snapshot.of(tensors, facts)
        if len(snapshot.servers) != self._job.strategy.server_count:
            self.remarks.append(recutting_notice(self._job, snapshot.servers))
        if not resharding:
            return snapshot
        snapshot, remark = resharded(snapshot, self._job, before)
        self.remarks.append(remark)
        return snapshot

    def _newest_whole(self) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        found = checkpoints(self._folder)
        if not found:
            raise RequestError(f"there is no checkpoint in {self._folder}: start the run anew")
        damaged: RequestError | None = None
        for path in found:
            try:
                tensors, facts = load_checkpoint(path)
            except RequestError as error:
                damaged = damaged or error
                continue
            if damaged is not None:
                self.remarks.append(
                    f"{damaged}, and the run goes on from that: epoch {facts['epoch']}, step {facts['step']}"
                )
            return path, tensors, facts
        assert damaged is not None
        raise damaged


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
