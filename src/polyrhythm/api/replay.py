"""Replay of a recorded run, for the verb `replay`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from polyrhythm.api.observed_run import choose_folder, create_folder
from polyrhythm.api.simulate import CLUSTER_FILE
from polyrhythm.config.assemble import assemble, data_of
from polyrhythm.config.recipe import CONFIG_FILE, configure, read_run
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.balance import Balance, Decided
from polyrhythm.errors import RequestError
from polyrhythm.events import BatchesBalanced
from polyrhythm.launch.devices import computing_with
from polyrhythm.reporting.event_log import EventLog, read_events
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.roles.checkpointing.recording import Recording, processor, read_recording, recorded_job
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.replay import Difference, Replay
from polyrhythm.simulation.replay import replay as play
from polyrhythm.strategies.role_assignment import RoleAssignment


def replay(run: str | Path, *, out: str | Path | None = None) -> dict[str, Any]:
    """Run a recorded run again in the simulator, with every rank receiving messages in the recorded order.

    Args:
        run: a run folder.
        out: a new or empty folder for the output of the replay (events in virtual seconds, model, report); None: no
            output on disk.

    Returns:
        JSON-able: `run`, `same` (bit for bit), `parameters_sha256` (`recorded` and `replayed`, the latter None if the
        replay did not finish), `messages` (replayed), `first_difference` (None, or where and what), `seconds`.

    Raises:
        RequestError: the folder holds no run that can be replayed, or `out` is in use.
    """
    started_at = time.perf_counter()
    folder = Path(run)
    if not (folder / CONFIG_FILE).is_file():
        raise RequestError(f"{folder} is not a run folder (it has no {CONFIG_FILE}): name the run to replay")
    if (folder / CLUSTER_FILE).is_file():
        raise RequestError(
            f"{folder} is a simulation, which is the same every time: repeat it with polyrhythm simulate "
            f"{folder / CONFIG_FILE} --cluster {folder / CLUSTER_FILE}"
        )
    recording = read_recording(folder)
    _check_whole(folder, recording)
    config = _config(folder, recording)
    job = _job(folder, config, recording)
    with computing_with(recording.threads):
        found = play(job, recording) if out is None else _play_into(Path(out), config, job, recording)
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
    if recording.workers_lost:
        raise RequestError(
            f"{folder} lost {recording.workers_lost} of its workers: the times of the failures are not recorded, so it "
            "cannot be replayed"
        )
    if recording.outcome != "done":
        raise RequestError(
            f"{folder} was {recording.outcome}: the times of the stops are not recorded, so it cannot be replayed"
        )


def _config(folder: Path, recording: Recording) -> RunConfig:
    values = read_run(folder / CONFIG_FILE)
    for key, value in values.items():
        if str(value).startswith("<your own"):
            raise RequestError(f"{folder} was trained with {key} {value}, which only your program has")
    if "," in str(values.get("device", "")):
        raise RequestError(
            f"{folder} was trained on {values['device']}: a replay computes on one kind of device, with other bits"
        )
    return configure(values, {"device": recording.device})


def _job(folder: Path, config: RunConfig, recording: Recording) -> Job:
    """Return the recorded job, without checkpoints."""
    job = assemble(config, CheckpointConfig(checkpoints=0), data_of(config, folder))
    if job.traits.one_host:
        raise RequestError(
            f"{folder} was trained with {job.strategy}, with shared memory: the order of reads is not "
            "recorded, so it cannot be replayed"
        )
    for key, value in recorded_job(job).items():
        if recording.job.get(key) != value:
            raise RequestError(
                f"{folder} was recorded with {key} {recording.job.get(key)}, its {CONFIG_FILE} has {value}"
            )
    return dataclasses.replace(job, ahead=0, balance=_decided(folder, job), script=recording.deal)


def _decided(folder: Path, job: Job) -> Balance:
    """Return the parts of global batches that the run decided on by what it measured, or its own rule."""
    if not job.balance.follows:
        return job.balance
    events = read_events(folder / "events.jsonl")
    return Decided(
        changes=tuple(
            (event.step, tuple(event.sizes)) for event in events if isinstance(event, BatchesBalanced)
        ),
        by="steps" if job.balance.by_steps else "images",
    )


def _play_into(out: Path, config: RunConfig, job: Job, recording: Recording) -> Replay:
    """Replay, with output in a run folder."""
    out = choose_folder(out, "replay")
    claim = create_folder(out, config, job)
    log = EventLog(out / "events.jsonl", claim)
    try:
        found = play(
            dataclasses.replace(job, checkpointing=CheckpointConfig(folder=out, checkpoints=0)),
            recording,
            log.on_event,
        )
    finally:
        log.close()
        claim.release()
    if found.parameters_sha256 is not None:  # else there may be nothing to report
        write_report(out)
    return found


def _described(difference: Difference, found: Replay, recording: Recording) -> dict[str, Any]:
    return {
        "where": _where(difference, recording.roles),
        **dataclasses.asdict(difference),
        "possible_causes": _causes(found, recording),
    }


def _where(difference: Difference, roles: RoleAssignment) -> str:
    if difference.rank < 0:
        return f"after {difference.message:,} messages"
    role, ranks = ("server", roles.servers) if difference.rank in roles.servers else ("worker", roles.workers)
    return (
        f"at {role} {ranks.index(difference.rank)} (rank {difference.rank}), message {difference.message:,}"
    )


def _causes(found: Replay, recording: Recording) -> list[str]:
    """Return known causes of a difference that are no fault of the run."""
    causes = []
    if found.summed_ranks > 2:
        causes.append(
            f"sums over {found.summed_ranks} ranks, which hosts of several ranks add up host by host, and a replay in "
            "the order of ranks: equal to rounding only"
        )
    if recording.torch != torch.__version__:
        causes.append(f"PyTorch {torch.__version__}, where the run had {recording.torch}")
    if recording.processor not in ("", processor()):
        causes.append(f"another processor ({processor()}), where the run had {recording.processor}")
    if recording.device != "cpu":
        causes.append("a GPU, where the order of sums may differ each time")
    return causes
