"""Runs with batches that grow by measured gradient noise; for the verbs `train` and `simulate`.

    epochs ──▶ checkpoint, noise scale ─▶ larger batch ─▶ the run resumes the checkpoint ─▶ …

The assignment of computation follows a schedule that all ranks know from the start. So the ranks restart each
time, as in a run of stages; nothing else is lost. The decisions are in `batches.json` in the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polyrhythm.api.observed_run import Run
from polyrhythm.api.stages import Lasting, Play, epochs_done, refuse_with_stages
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import BATCH_SCHEDULES, assemble, checkpoints_of
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, NoiseMeasured, Notice
from polyrhythm.reporting.event_log import Observer
from polyrhythm.reporting.figures import noise_scale
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.run_files import read_json_in_run
from polyrhythm.specs import build
from polyrhythm.training.batch_schedules.auto import Auto
from polyrhythm.training.checkpoint import checkpoints
from polyrhythm.training.schedule import BatchSchedule

_DECIDED = "batches.json"


def by_noise(config: RunConfig) -> Auto | None:
    """Return the batch schedule of a configuration, if batches grow by noise; None: they do not."""
    given = config.batch_schedule
    made = given if isinstance(given, BatchSchedule) else build("batch schedule", str(given), BATCH_SCHEDULES)
    return made if isinstance(made, Auto) else None


def with_growing_batches(
    schedule: Auto, config: RunConfig, folder: Path, observers: Sequence[Observer], play: Play
) -> Run:
    """Make a run, or the rest of one.

    Args:
        schedule: rule of the batches' growth.
        config: configuration of the run.
        folder: folder of the run; epochs before a checkpoint in it are not repeated.
        observers: receivers of every event, and one end.
        play: function that runs some epochs.

    Returns:
        The last part's run, or that which was interrupted.

    Raises:
        RequestError: the run is impossible, or nothing is measured in it.
    """
    refuse_with_stages("--batch-schedule auto", config)
    if config.until is not None:
        raise RequestError("--until and --batch-schedule auto exclude each other: leave one of them out")
    kept = checkpoints_of(config, folder)
    first = assemble(config, kept)
    if not (first.traits.mean_updates and first.workers > 1):
        raise RequestError(
            "--batch-schedule auto needs the noise between the gradients of several workers that average them at every "
            "step: use synchronous with 2 workers or more, or another batch schedule"
        )
    total, batch = first.learning.epochs, config.workers * config.worker_batch
    every = max(1, round(schedule.every * total))
    path = folder / _DECIDED
    if path.is_file():
        recorded = read_json_in_run(path)
        decided_before = {key: recorded.get(key) for key in ("factors", "gains")}
        if not all(
            isinstance(each, list) and all(isinstance(number, int | float) for number in each)
            for each in decided_before.values()
        ):
            raise RequestError(f"{path} is damaged: take it from a backup, or start a new run")
        schedule = schedule.model_copy(
            update={key: tuple(each or ()) for key, each in decided_before.items()}
        )
    begun, done = bool(checkpoints(folder / FOLDER)), epochs_done(folder)
    measured, run = _Noise(), None
    while True:
        end = min(total, (done // every + 1) * every)
        for decided in range(len(schedule.factors), end):
            before = schedule
            factor, gain = schedule.decided(measured.scale, batch, len(first.dataset.train))
            if decided % every:
                factor, gain = before.factors[-1], before.gains[-1]
            grown = {"factors": (*before.factors, factor), "gains": (*before.gains, gain)}
            schedule = before.model_copy(update=grown)
            if before.factors and factor != before.factors[-1]:
                text = (
                    f"steps have {factor * batch:,} images from epoch {decided + 1} on, and the learning rate is "
                    f"{gain:.3g} times that of the first ones: the gradient noise scale is {measured.scale:,.0f} images"
                )
                for observer in observers:
                    observer.on_event(Notice(time_s=measured.time_s, text=text))
        last = end == total
        job = assemble(config.model_copy(update={"batch_schedule": schedule}), kept)
        part = replace(
            job,
            learning=replace(job.learning, epochs=end, all_epochs=total),
            checkpointing=replace(kept, resume=begun),
        )
        watching = [each if last else Lasting(each) for each in observers]
        if begun:  # before the first part there is nothing to remember, and no folder
            written = {"factors": schedule.factors, "gains": schedule.gains}
            UNCLAIMED.write(path, json.dumps(written) + "\n")
        run = play(done, part, [*watching, measured], last)
        begun = True
        if run.outcome != "done" or last:
            break
        done = end
    batches = [factor * batch for factor in schedule.factors]
    return replace(run, figures=run.figures | {"batches": batches, "batch_gains": list(schedule.gains)})


class _Noise:
    """Hears what is measured of the noise.

    Attributes:
        time_s: time in seconds of the latest event.
    """

    def __init__(self) -> None:
        self._measured: list[NoiseMeasured] = []
        self.time_s = 0.0

    def on_event(self, event: Event) -> None:
        """Store the facts of an event."""
        self.time_s = event.time_s
        if isinstance(event, NoiseMeasured):
            self._measured.append(event)

    def close(self) -> None:
        """Do nothing: more events follow."""

    @property
    def scale(self) -> float | None:
        """The noise scale of the latter half of the steps so far, in images; None: too little is known."""
        found = noise_scale(self._measured)
        return None if found is None else float(found["images"])
