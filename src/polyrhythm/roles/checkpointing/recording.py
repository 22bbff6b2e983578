"""A run's recording: the order of each rank's received messages, as one small file of the run folder."""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.data.dealer import Grant
from polyrhythm.errors import RequestError, RunError
from polyrhythm.roles.checkpointing.archive import identity
from polyrhythm.roles.job import Job
from polyrhythm.run_files import MOST_EVENTS_BYTES, read_json_in_run
from polyrhythm.strategies.role_assignment import RoleAssignment

ARRIVALS_FILE = "arrivals.json"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Facts that a replay needs in addition to the run's configuration.

    Attributes:
        job: facts that identify the run.
        roles: assignment of roles to ranks.
        ranks: the arrivals of every rank that received from anyone.
        resumed: whether the run began at a checkpoint.
        outcome: `done` or `interrupted`.
        parameters_sha256: SHA-256 of the final parameters.
        device: device of the replicas, such as `cpu`.
        threads: compute threads of a worker; sums over several have another order.
        torch: version of PyTorch.
        processor: model and instruction set that worker 0 computed with; empty in older recordings.
        workers_lost: number of worker failures, which the arrivals do not show.
        deal: grants of every unit of workers, with dynamic batches; else None.
    """

    job: dict[str, Any]
    roles: RoleAssignment
    ranks: dict[int, Arrivals]
    resumed: bool
    outcome: str
    parameters_sha256: str
    device: str
    threads: int
    torch: str
    processor: str = ""
    workers_lost: int = 0
    deal: list[list[Grant]] | None = None

    @property
    def messages(self) -> int:
        """How many messages were noted."""
        return sum(map(len, self.ranks.values()))

    def write(self, folder: Path, claim: Unclaimed = UNCLAIMED) -> None:
        """Write the recording into a run folder, whole or not at all.

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
            "workers": list(self.roles.workers),
            "servers": list(self.roles.servers),
            "resumed": self.resumed,
            "outcome": self.outcome,
            "parameters_sha256": self.parameters_sha256,
            "device": self.device,
            "threads": self.threads,
            "torch": self.torch,
            "processor": self.processor,
            "workers_lost": self.workers_lost,
            "deal": None if self.deal is None else [[astuple(each) for each in unit] for unit in self.deal],
            "ranks": {str(rank): arrivals.to_json() for rank, arrivals in self.ranks.items()},
        }


@cache
def processor() -> str:
    """Return the model of this machine's processor and the instruction set that torch uses: bits depend on both."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor())}, {torch.backends.cpu.get_cpu_capability()}"


def recorded_job(job: Job) -> dict[str, Any]:
    """Return the facts that a run and its replay must share, JSON-able."""
    learning = job.learning
    return {
        **identity(job),
        "epochs": learning.epochs,
        "schedule": str(learning.schedule),
        "steps per epoch": job.steps_per_epoch,
        "steps": job.calendar.total_steps,
    }


def recording_of(job: Job, roles: RoleAssignment, ranks: dict[int, Arrivals], **ending: Any) -> Recording:
    """Make the recording of a run that has just ended on this rank.

    Args:
        job: training job.
        roles: roles of the ranks.
        ranks: arrivals of every rank.
        **ending: `outcome`, `parameters_sha256`, `workers_lost` and `deal`.
    """
    return Recording(
        job=recorded_job(job),
        roles=roles,
        ranks={rank: arrivals for rank, arrivals in sorted(ranks.items()) if len(arrivals)},
        resumed=job.checkpointing.resume,
        device=job.device.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        processor=processor(),
        **ending,
    )


def read_recording(folder: Path) -> Recording:
    """Read the recording of a run folder.

    Raises:
        RequestError: there is none, or it is damaged.
    """
    path = folder / ARRIVALS_FILE
    if not path.is_file():
        raise RequestError(
            f"{folder} holds no {ARRIVALS_FILE}: only a run that has ended well can be replayed"
        )
    try:
        return _from_json(read_json_in_run(path, MOST_EVENTS_BYTES))
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
    roles = RoleAssignment(tuple(map(int, value["workers"])), tuple(map(int, value["servers"])))
    ranks = {int(rank): Arrivals.from_json(entry) for rank, entry in value["ranks"].items()}
    if sorted(roles.workers + roles.servers) != list(range(roles.size)) or 0 not in roles.workers:
        raise ValueError("workers and servers are not all ranks, once each")
    for rank, arrivals in ranks.items():
        if rank not in range(roles.size) or any(source >= roles.size for source in arrivals.sources):
            raise ValueError(f"there are ranks 0 to {roles.size - 1}, and others were heard")
    return Recording(
        job=dict(value["job"]),
        roles=roles,
        ranks=ranks,
        resumed=bool(value["resumed"]),
        outcome=str(value["outcome"]),
        parameters_sha256=str(value["parameters_sha256"]),
        device=str(value["device"]),
        threads=max(1, int(value["threads"])),
        torch=str(value["torch"]),
        processor=str(value.get("processor", "")),
        workers_lost=int(value.get("workers_lost", 0)),
        deal=_deal(value.get("deal")),
    )


def _deal(value: Any) -> list[list[Grant]] | None:
    return None if value is None else [[Grant(*map(int, numbers)) for numbers in unit] for unit in value]
