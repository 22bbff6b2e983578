"""Checkpoints of a whole run: every rank's state in one file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job
from polyrhythm.roles.worker_state import WorkerState
from polyrhythm.strategies.strategy import State
from polyrhythm.training.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
)

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        epoch: whole epochs done by the leader.
        step: steps done by the leader.
        seconds: trained so far.
        parameters: `(n,)`, the leader's.
        workers: the latest state of every worker that had sent one.
        servers: one state a server.
        average: the moving average of the weights, if there is one.
    """

    epoch: int
    step: int
    seconds: float
    parameters: Tensor
    workers: dict[int, WorkerState]
    servers: list[State] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)

    def worker(self, index: int, replicated: bool) -> WorkerState:
        """Gives a worker's state; where it had sent none, or its part is everybody's, that comes from worker 0."""
        leader = self.workers[0]
        own = self.workers.get(index, leader)
        return replace(own, part=leader.part, part_facts=leader.part_facts) if replicated else own

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        named = {"parameters": self.parameters}
        for index, worker in self.workers.items():
            named |= {f"worker.{index}.{name}": value for name, value in worker.tensors().items()}
        for index, (tensors, _) in enumerate(self.servers):
            named |= {f"server.{index}.{name}": value for name, value in tensors.items()}
        return named | {f"average.{name}": value for name, value in self.average.items()}

    def facts(self) -> dict[str, Any]:
        """All that is not a tensor, JSON-able."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "workers": {str(index): worker.facts() for index, worker in self.workers.items()},
            "servers": [facts for _, facts in self.servers],
        }

    @classmethod
    def of(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Snapshot:
        """Rebuilds a snapshot from `tensors` and `facts`."""
        workers = {
            int(index): WorkerState.from_tensors(_below(f"worker.{index}.", tensors), entry)
            for index, entry in facts["workers"].items()
        }
        servers = [
            (_below(f"server.{index}.", tensors), entry) for index, entry in enumerate(facts["servers"])
        ]
        return cls(
            facts["epoch"],
            facts["step"],
            facts["seconds"],
            tensors["parameters"],
            workers,
            servers,
            _below("average.", tensors),
        )


class Archive:
    """The checkpoints of a run folder.

    Args:
        job: what is trained; a checkpoint of another job is refused.
    """

    def __init__(self, job: Job) -> None:
        assert job.keeping.folder is not None
        self._folder: Path = job.keeping.folder / FOLDER
        self._keep = job.keeping.checkpoints
        self._identity = identity(job)

    def save(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and removes old ones; gives its path inside the run folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint_path(self._folder, snapshot.step)
        save_checkpoint(path, snapshot.tensors(), {"job": self._identity, **snapshot.facts()})
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
        for key, value in self._identity.items():
            if facts["job"][key] != value:
                raise RequestError(
                    f"{path} was trained with {key} {facts['job'][key]}, not {value}: resume with that"
                )
        return Snapshot.of(tensors, facts)


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


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
