"""Training, as the verb `train` does it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import torch

from polyrhythm.api import resuming, run_folder
from polyrhythm.api.entering import admission_of, entrance_of
from polyrhythm.api.observed_run import ObservedRun, Run, observed_run
from polyrhythm.api.thawing import train_thawing
from polyrhythm.config.assemble import assemble, strategy_from
from polyrhythm.config.model import name_of
from polyrhythm.config.options import RunOptions
from polyrhythm.config.recipe import CONFIG_FILE, configure, read_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, Notice
from polyrhythm.launch.children.local import run_local
from polyrhythm.launch.children.restarting import run_restarting
from polyrhythm.launch.preemption import Preempted
from polyrhythm.launch.torchrun import started_rank as torchrun
from polyrhythm.launch.torchrun.spokesman import is_silent, leader_speaks, leads, started_by_torchrun
from polyrhythm.reporting.observer import Observer
from polyrhythm.reporting.step_trace import TRACE_FILE, StepTrace
from polyrhythm.roles.job import Job, Keeping
from polyrhythm.training.optimizing.quick_optimizers import make_optimizers_quickly


def train(
    recipe: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
    start_method: str = "spawn",
    **options: Unpack[RunOptions],
) -> Run | None:
    """Trains a classifier on several workers.

    A script must call this below `if __name__ == "__main__":`, since workers import it anew.

    Args:
        recipe: a YAML file of options.
        out: the run folder, new or empty; None makes one under `runs/`.
        resume: the folder of a run to continue; `options` then change its configuration. `auto`: the one of `out` if
            there is a run in it, else a new one; of one that has nothing left to do, the figures are given once more.
        observers: get every event, in this process.
        start_method: of local workers: `spawn`, or `fork` from a process that has not computed on several threads.
        **options: any field of `RunConfig`. `data` and `model` may be objects: a pair (train, test) of torch
            data sets or of (images, labels) tensors, and a module.

    Returns:
        The run; None in a rank of torchrun that does not lead.

    Raises:
        RequestError: something in the request is wrong; nothing has been written.
        RunError: the run failed.
    """
    _check_importable()
    with leader_speaks():
        again = resuming.is_automatic(resume)
        out, resume = resuming.automatic(out, resume)
        config = _configuration(recipe, resume, options)
        if started_by_torchrun():
            config = _with_torchruns_workers(config, options)
        folder = _folder(config, out, resume)
        keeping = Keeping(
            folder=folder,
            checkpoints=config.keep_checkpoints,
            resume=resume is not None and not resuming.died_young(folder, config),
            best=config.keep_best,
        )
        job = assemble(config, keeping)
        # who comes late would look while checkpoints come and go
        run = resuming.finished(job) if keeping.resume and not is_silent() else None
        if run is not None and not again:
            raise resuming.all_done(folder, run.figures["epochs"])
    if run is not None:
        if started_by_torchrun():
            torchrun.take_leave(config.gather_s)
        return run
    if config.freeze_epochs is not None:
        common = {"observers": observers, "start_method": start_method}
        return train_thawing(train, config, job.learning.epochs, folder, **common)
    if started_by_torchrun():
        return _train_under_torchrun(job, config, observers)
    _check_port(config.port)
    return _train_here(job, config, observers, start_method)


def _check_importable() -> None:
    """Refuses to train while a spawned worker imports the script that has called us; multiprocessing knows."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RequestError('workers import this script anew: call train below `if __name__ == "__main__":`')


def _configuration(recipe: str | Path | None, resume: str | Path | None, options: RunOptions) -> RunConfig:
    layers = []
    if resume is not None:
        layers.append(read_recipe(_resumed_config(Path(resume))))
    if recipe is not None:
        layers.append(read_recipe(Path(recipe)))
    return configure(*layers, options)


def _resumed_config(folder: Path) -> Path:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RequestError(f"{folder} is not a run folder (it has no {CONFIG_FILE}): name the one to resume")
    return path


def _folder(config: RunConfig, out: str | Path | None, resume: str | Path | None) -> Path:
    if resume is None:
        if out is not None and is_silent():
            return Path(out)  # which the rank that leads looks at, and may have begun to fill by now
        return run_folder.choose(
            out, f"{strategy_from(config.strategy).name}-{name_of(config.model).split('(')[0]}"
        )
    if out is not None:
        raise RequestError("--out and --resume exclude each other: a resumed run stays in its folder")
    return Path(resume)


def _check_port(port: int) -> None:
    """Finds out before anything is written; the store will listen there a moment later."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RequestError(
                f"port {port} cannot be used ({error.strerror}): choose another with --port"
            ) from None


def _train_here(job: Job, config: RunConfig, observers: Sequence[Observer], start_method: str) -> Run:
    with (
        _observed_with_trace(job, config, observers) as observed,
        entrance_of(observed.claimed(job), config) as entrance,
    ):
        # a GPU that this process has touched cannot be used by a fork of it
        method = "spawn" if job.device.type == "cuda" else start_method

        def play(job: Job, emit: Callable[[Event], None]) -> bool:
            return run_local(
                job,
                emit,
                port=config.port,
                threads=config.threads,
                start_method=method,
                entrance=entrance,
            )

        restarts = config.restarts if config.keep_checkpoints and entrance is None else 0
        preempted = run_restarting(observed.claimed(job), play, observed.on_event, restarts)
        observed.skips_report = preempted
    run = observed.run()
    return dataclasses.replace(run, preempted=preempted and run.outcome == "interrupted")


@contextmanager
def _observed_with_trace(job: Job, config: RunConfig, observers: Sequence[Observer]) -> Iterator[ObservedRun]:
    assert job.keeping.folder is not None
    with observed_run(job, config, observers) as observed:
        if config.timings:
            observed.add_observer(StepTrace(job.keeping.folder / TRACE_FILE, observed.claim))
        yield observed


def _with_torchruns_workers(config: RunConfig, options: RunOptions) -> RunConfig:
    workers = torchrun.workers_of(strategy_from(config.strategy)) + config.vacant
    if options.get("workers") not in (None, workers):
        raise RequestError(
            f"torchrun's processes leave {workers} workers, not {options['workers']}: omit --workers"
        )
    return config.model_copy(update={"workers": workers})


def _train_under_torchrun(job: Job, config: RunConfig, observers: Sequence[Observer]) -> Run | None:
    losses = dataclasses.replace(job.losses, restarts=0)  # whom to start again is torchrun's business
    job = dataclasses.replace(job, device=torchrun.device_of(job.device), losses=losses)
    if not leads():
        if torchrun.run_under_torchrun(
            job, _say_notices, config.threads, admission_of(job, config), config.gather_s
        ):
            raise Preempted("the run was interrupted, since one of its hosts is taken away")
        return None
    with (
        _observed_with_trace(job, config, observers) as observed,
        entrance_of(observed.claimed(job), config) as entrance,
    ):
        admission = admission_of(observed.claimed(job), config, entrance)
        preempted = torchrun.run_under_torchrun(
            observed.claimed(job), observed.on_event, config.threads, admission, config.gather_s
        )
        observed.skips_report = preempted
    return dataclasses.replace(observed.run(), preempted=preempted)


def _say_notices(event: Event) -> None:
    """Says what the watchdog of a rank that does not lead has to say."""
    if isinstance(event, Notice):
        print(f"notice: {event.text}", file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Keeps this process to one compute thread, so that workers can be forked from it safely, and starts soon."""
    torch.set_num_threads(1)
    make_optimizers_quickly()
