"""Runs of several strategies, one after the other, in one folder; for the verbs `train` and `simulate`.

    stage 1 ── epochs ──▶ checkpoint ─▶ stage 2, as a resumed run of another strategy ─▶ …

`checkpointing/handing_over.py` defines the transferred state. Schedules follow the whole run. A resumed run
continues in the stage of its newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polyrhythm.api.observed_run import Run
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import assemble, checkpoints_of
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.stages import Stage, Stages
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.events import Event, RunEnded
from polyrhythm.reporting.event_log import Observer
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.run_files import read_json_in_run
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint

STAGES_FILE = "stages.json"
"""In a run folder: the epochs that were done at the end of each stage that is over."""

Play = Callable[[int, Job, Sequence[Observer], bool], Run]
"""Makes the run of a part, from its number and its job, for some observers; whether it is the last one."""


@dataclass(frozen=True)
class StagedRun:
    """A run of stages, not begun or partly done.

    Attributes:
        stages: the strategies.
        until: end of all of them.
        kept: folder and checkpoints that are kept.
        jobs: jobs of the stages, none of them resumed.
    """

    stages: Stages
    until: Target | None
    kept: CheckpointConfig
    jobs: tuple[Job, ...]


def staged_run(
    stages: Stages,
    config: RunConfig,
    folder: Path,
    fitted: Callable[[RunConfig], RunConfig] = lambda config: config,
) -> StagedRun:
    """Return a run of stages, after checking all of them.

    Args:
        stages: the strategies.
        config: configuration of the run; its strategy is not regarded.
        folder: folder of the run.
        fitted: returns the configuration of a stage, where it depends on the strategy.

    Raises:
        RequestError: a stage is impossible.
    """
    refuse_with_stages("stages", config)
    kept = checkpoints_of(config, folder)
    jobs = [
        assemble(fitted(config.model_copy(update={"strategy": stage.strategy})), kept)
        for stage in stages.stages
    ]
    total = jobs[0].learning.epochs
    parts = [
        replace(
            job,
            learning=replace(job.learning, epochs=end or total, all_epochs=total),
            until=stage.target or job.until,
        )
        for stage, job, end in zip(stages.stages, jobs, stages.ends(total), strict=True)
    ]
    return StagedRun(stages, jobs[0].until, kept, tuple(parts))


def in_stages(staged: StagedRun, observers: Sequence[Observer], play: Play) -> Run:
    """Make a run of stages, or the rest of one.

    Args:
        staged: the run; epochs before a checkpoint in its folder are not repeated.
        observers: receivers of every event, and one end.
        play: function that runs one stage.

    Returns:
        The last stage's run, or that which was interrupted.
    """
    stages, folder, total = staged.stages.stages, staged.kept.folder, staged.jobs[-1].learning.planned_epochs
    assert folder is not None, "a run of stages has a folder"
    ends, over = staged.stages.ends(total), _over(folder)
    rows, run, last = [], None, False
    for number, (stage, job, end) in enumerate(zip(stages, staged.jobs, ends, strict=True)):
        begun, done = bool(checkpoints(folder / FOLDER)), epochs_done(folder)
        if number == len(over) and end is not None and end <= done and number + 1 < len(stages):
            over = [*over, end]  # the checkpoint records that its file does not
        if number < len(over) and over[number] < total:
            rows.append(
                {"strategy": str(job.strategy), "epochs": over[number] - (over[number - 1] if number else 0)}
            )
            continue
        last = number == len(stages) - 1
        part = replace(job, checkpointing=replace(staged.kept, resume=begun))
        follows = partial(_follows, stage, staged.until, total)
        run = play(number, part, observers if last else [Lasting(each, follows) for each in observers], last)
        if run.outcome != "done":
            break
        over = [*over[:number], int(run.figures["epochs"])]
        _end_at_epoch(folder)
        rows.append({"strategy": str(job.strategy), "epochs": over[-1] - (over[-2] if number else 0)})
        UNCLAIMED.write(folder / STAGES_FILE, json.dumps({"epochs_done": over}) + "\n")
        if not follows(run.figures):
            break
    assert run is not None
    if not last:
        write_report(folder)
    return replace(run, figures=run.figures | {"strategy": str(staged.stages), "stages": rows})


def refuse_with_stages(what: str, config: RunConfig) -> None:
    """Reject options of a single run where the run has several parts, one after the other.

    Args:
        what: name of the option that makes it so, for the error message.
        config: configuration of the run.

    Raises:
        RequestError: it has such an option.
    """
    for given, option in (
        (config.updates is not None, "--updates"),
        (config.freeze_epochs is not None, "--freeze-epochs"),
        (config.listen is not None, "--listen"),
        (config.keep_checkpoints == 0, "--keep-checkpoints 0"),
    ):
        if given:
            raise RequestError(f"{option} and {what} exclude each other: leave one of them out")


def _follows(stage: Stage, until: Target | None, total: int, figures: Mapping[str, Any]) -> bool:
    """Return whether a stage that ended with these figures leaves the next one anything to do."""
    if figures["epochs"] >= total:
        return False
    if until is None or figures.get("test_top1") is None:
        return True
    loss, top1, top5 = (figures[name] for name in ("test_loss", "test_top1", "test_top5"))
    return not until.reached(loss=loss, top1=top1, top5=top5)


def _over(folder: Path) -> list[int]:
    """Return how many epochs were done at the end of each stage that is over, as far as checkpoints still hold them."""
    try:
        found = read_json_in_run(folder / STAGES_FILE)["epochs_done"]
    except (FileNotFoundError, KeyError):
        return []
    if not isinstance(found, list) or not all(type(epochs) is int for epochs in found):
        raise RequestError(
            f"{folder / STAGES_FILE} is damaged: remove it, and the stages are taken from the checkpoints"
        )
    done = epochs_done(folder)
    return [epochs for epochs in found if epochs <= done]


def _end_at_epoch(folder: Path) -> None:
    """Remove checkpoints of steps behind an epoch's end, taken while workers were notified of a reached target."""
    found = _readable(folder)
    for path, epochs in found:
        if [each for _, each in found].count(epochs) > 1 and (path, epochs) != next(
            entry for entry in reversed(found) if entry[1] == epochs
        ):
            path.unlink()


def epochs_done(folder: Path) -> int:
    """Return the epochs of the newest checkpoint that can be read; 0 without one."""
    return next((epochs for _, epochs in _readable(folder)), 0)


def _readable(folder: Path) -> list[tuple[Path, int]]:
    """Return the checkpoints that can be read, the newest first, and how many epochs each has done."""
    found = []
    for path in checkpoints(folder / FOLDER):
        with suppress(RequestError, KeyError, TypeError, ValueError, ArithmeticError):
            found.append((path, int(load_checkpoint(path)[1]["epoch"])))
    return found


class Lasting:
    """An observer for which the next stage is the same run.

    Args:
        observer: observer of the whole run.
        follows: whether another stage follows one that has ended with these figures; default: always.
    """

    def __init__(
        self, observer: Observer, follows: Callable[[Mapping[str, Any]], bool] = lambda figures: True
    ) -> None:
        self._observer = observer
        self._follows = follows
        self._over = False

    def on_event(self, event: Event) -> None:
        """Pass an event on, but for an end after which the next stage begins."""
        if isinstance(event, RunEnded):
            if event.outcome == "done" and self._follows(event.result):
                return
            self._over = True
        self._observer.on_event(event)

    def close(self) -> None:
        """Close the observer if the run is over; else the next stage follows."""
        if self._over:
            self._observer.close()
