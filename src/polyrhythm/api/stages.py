"""Runs of several strategies, one after the other, in one folder; for the verbs `train` and `simulate`.

    stage 1 ── epochs ──▶ checkpoint ─▶ stage 2, as a resumed run of another strategy ─▶ …

What is handed over is in `checkpointing/handing_over.py`. Schedules follow the whole run. A run that is resumed goes on
in the stage that its newest checkpoint belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from polyrhythm.api.observed_run import Run
from polyrhythm.config.assemble import assemble
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.stages import Stages
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, RunEnded
from polyrhythm.reporting.event_log import Observer
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint

Play = Callable[[Job, Sequence[Observer], bool], Run]
"""Makes the run of a job for some observers; whether it is the last one."""


def in_stages(
    stages: Stages, config: RunConfig, folder: Path, observers: Sequence[Observer], play: Play
) -> Run:
    """Make a run of stages, or what is left of one.

    Args:
        stages: the strategies.
        config: of the run; its strategy is not regarded.
        folder: of the run; what a checkpoint in it has come to is not done again.
        observers: receive every event, and one end.
        play: makes the run of one stage.

    Returns:
        The last stage's run, or that which was interrupted.

    Raises:
        RequestError: a stage is impossible.
    """
    refuse_together("stages", config)
    kept = CheckpointConfig(
        folder=folder, checkpoints=config.keep_checkpoints, best=config.keep_best, resume=False
    )
    jobs = [
        assemble(config.model_copy(update={"strategy": stage.strategy}), kept) for stage in stages.stages
    ]  # all of them, so that what is impossible is refused before anything is trained
    total = jobs[0].learning.epochs
    ends, done = stages.ends(total), epochs_done(folder)
    told, run = [], None
    for number, (job, end) in enumerate(zip(jobs, ends, strict=True)):
        last = number == len(jobs) - 1
        told.append({"strategy": str(job.strategy), "epochs": end - (ends[number - 1] if number else 0)})
        if done >= end and not last:
            continue
        begun = bool(checkpoints(folder / FOLDER))
        part = replace(
            job,
            learning=replace(job.learning, epochs=end, all_epochs=total),
            checkpointing=replace(kept, resume=begun),
        )
        run = play(part, observers if last else [Lasting(each) for each in observers], last)
        if run.outcome != "done":
            break
    assert run is not None
    return replace(run, figures=run.figures | {"strategy": str(stages), "stages": told})


def refuse_together(what: str, config: RunConfig) -> None:
    """Refuse options of one run where it is made of several, one after the other.

    Args:
        what: makes it so, for an error's text.
        config: of the run.

    Raises:
        RequestError: it has such an option.
    """
    for given, option in (
        (config.updates is not None, "--updates"),
        (config.until is not None, "--until"),
        (config.freeze_epochs is not None, "--freeze-epochs"),
        (config.listen is not None, "--listen"),
        (config.keep_checkpoints == 0, "--keep-checkpoints 0"),
    ):
        if given:
            raise RequestError(f"{option} and {what} cannot be had together: leave one of them out")


def epochs_done(folder: Path) -> int:
    """Return the epochs of the newest checkpoint that can be read; 0 without one."""
    for path in checkpoints(folder / FOLDER):
        try:
            return int(load_checkpoint(path)[1]["epoch"])
        except RequestError:
            continue
    return 0


class Lasting:
    """An observer for which the next stage is the same run."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_event(self, event: Event) -> None:
        """Pass an event on, but for an end after which the next stage begins."""
        if not (isinstance(event, RunEnded) and event.outcome == "done"):
            self._observer.on_event(event)

    def close(self) -> None:
        """Do nothing: the next stage follows."""
