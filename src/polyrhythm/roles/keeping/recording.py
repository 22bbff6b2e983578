"""A run's recording: whom every rank heard, in order, as one small file of the run folder."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.errors import RequestError, RunError
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import identity
from polyrhythm.strategies.role_assignment import RoleAssignment

ARRIVALS_FILE = "arrivals.json"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a replay needs beside the run's configuration.

    Attributes:
        job: what identifies the run.
        cast: which ranks did what.
        ranks: the arrivals of every rank that received from anyone.
        resumed: whether the run began at a checkpoint.
        outcome: `done` or `interrupted`.
        parameters_sha256: of the final parameters.
        device: where replicas lived, such as `cpu`.
        threads: compute threads of a worker; sums over several have another order.
        torch: its version.
        workers_lost: how often a worker was lost, of which its arrivals do not tell.
    """

    job: dict[str, Any]
    cast: RoleAssignment
    ranks: dict[int, Arrivals]
    resumed: bool
    outcome: str
    parameters_sha256: str
    device: str
    threads: int
    torch: str
    workers_lost: int = 0

    @property
    def messages(self) -> int:
        """How many messages were noted."""
        return sum(map(len, self.ranks.values()))

    def write(self, folder: Path, claim: Unclaimed = UNCLAIMED) -> None:
        """Writes the recording into a run folder, whole or not at all.

        Raises:
            Superseded: the folder is another's.
            RunError: the system could not write it.
        """
        path = folder / ARRIVALS_FILE
        partial = claim.draft(path)
        try:
            partial.write_text(json.dumps(self._to_json(), indent=1) + "\n", encoding="utf-8")
            claim.publish(path)
        except OSError as error:
            claim.check()
            raise RunError(f"cannot write {path}: {error.strerror or error}") from None
        finally:
            with suppress(OSError):
                partial.unlink()

    def _to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "workers": list(self.cast.workers),
            "servers": list(self.cast.servers),
            "resumed": self.resumed,
            "outcome": self.outcome,
            "parameters_sha256": self.parameters_sha256,
            "device": self.device,
            "threads": self.threads,
            "torch": self.torch,
            "workers_lost": self.workers_lost,
            "ranks": {str(rank): arrivals.to_json() for rank, arrivals in self.ranks.items()},
        }


def recorded_job(job: Job) -> dict[str, Any]:
    """Gives what must be equal of a run and its replay, JSON-able."""
    learning = job.learning
    return {
        **identity(job),
        "epochs": learning.epochs,
        "schedule": str(learning.schedule),
        "steps per epoch": job.steps_per_epoch,
        "steps": job.calendar.total_steps,
    }


def recording_of(job: Job, cast: RoleAssignment, ranks: dict[int, Arrivals], **ending: Any) -> Recording:
    """Makes the recording of a run that has just ended on this rank.

    Args:
        job: what was learned.
        cast: who did what.
        ranks: every rank's arrivals.
        **ending: `outcome`, `parameters_sha256` and `workers_lost`.
    """
    return Recording(
        job=recorded_job(job),
        cast=cast,
        ranks={rank: arrivals for rank, arrivals in sorted(ranks.items()) if len(arrivals)},
        resumed=job.keeping.resume,
        device=job.device.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        **ending,
    )


def read_recording(folder: Path) -> Recording:
    """Reads the recording of a run folder.

    Raises:
        RequestError: there is none, or it is damaged.
    """
    path = folder / ARRIVALS_FILE
    if not path.is_file():
        raise RequestError(
            f"{folder} holds no {ARRIVALS_FILE}: only a run that has ended well can be replayed"
        )
    try:
        return _from_json(json.loads(path.read_text(encoding="utf-8")))
    except (
        ArithmeticError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OSError,
    ) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise RequestError(f"{path} is damaged ({what}): the run cannot be replayed") from None


def _from_json(value: dict[str, Any]) -> Recording:
    cast = RoleAssignment(tuple(map(int, value["workers"])), tuple(map(int, value["servers"])))
    ranks = {int(rank): Arrivals.from_json(entry) for rank, entry in value["ranks"].items()}
    if sorted(cast.workers + cast.servers) != list(range(cast.size)) or 0 not in cast.workers:
        raise ValueError("workers and servers are not all ranks, once each")
    for rank, arrivals in ranks.items():
        if rank not in range(cast.size) or any(source >= cast.size for source in arrivals.sources):
            raise ValueError(f"there are ranks 0 to {cast.size - 1}, and others were heard")
    return Recording(
        job=dict(value["job"]),
        cast=cast,
        ranks=ranks,
        resumed=bool(value["resumed"]),
        outcome=str(value["outcome"]),
        parameters_sha256=str(value["parameters_sha256"]),
        device=str(value["device"]),
        threads=max(1, int(value["threads"])),
        torch=str(value["torch"]),
        workers_lost=int(value.get("workers_lost", 0)),
    )
