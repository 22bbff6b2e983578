"""Training, for the verb `train`; with resumed runs, and runs in two phases.

Resuming a run depends on when it stopped:

    died     before its first checkpoint ─▶ starts again, in the same folder
             on the way                  ─▶ continues from its last complete checkpoint
             after its last checkpoint   ─▶ tests and saves its model, and ends
    ended                       ─▶ refused; if the same request is repeated (`auto`), its figures are returned again

Staged fine-tuning (`freeze_epochs`): a part stays frozen at first, then nearly everything is trained.

    RUN-frozen:  `freeze_epochs` epochs with `freeze`      RUN:  the other epochs from its weights, norms frozen

Batch norms stay frozen in the second phase too: statistics of a few small batches would replace those of the
many that the weights were trained with, and networks that are trained with the one and tested with the other
lose accuracy. The phases are two runs, which can be inspected, resumed and evaluated separately; each has a
complete learning-rate schedule.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log2, prod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from polyrhythm.api.evaluation_place import evaluated_here, with_place_of_tests
from polyrhythm.api.fine_tuning import FineTuning, suited
from polyrhythm.api.growing import by_noise, with_growing_batches
from polyrhythm.api.joining import admission_of, entrance_of
from polyrhythm.api.observed_run import (
    ObservedRun,
    Run,
    choose_folder,
    finished_run,
    observed_run,
    tested_epochs,
)
from polyrhythm.api.stages import Lasting, StagedRun, in_stages, staged_run
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import assemble, checkpoints_of, data_of, default_optimizer, strategy_from
from polyrhythm.config.ensemble import Ensemble, refuse_distill
from polyrhythm.config.image_size import with_image_size
from polyrhythm.config.model import devices_from, model_maker, name_of
from polyrhythm.config.recipe import CONFIG_FILE, ENVIRONMENT_FILE, configure, read_recipe, read_run_folder
from polyrhythm.config.run_config import RunConfig, RunOptions
from polyrhythm.config.stages import Stages
from polyrhythm.config.trained import MODEL_FILE
from polyrhythm.data.image_files import ImageSource
from polyrhythm.data.images import CENTRE
from polyrhythm.data.open import source_of
from polyrhythm.errors import PolyrhythmError, RequestError
from polyrhythm.evaluation.feature_cache import call_in_process, measure
from polyrhythm.events import Event, Notice
from polyrhythm.launch.children import run_local, run_restarting
from polyrhythm.launch.energy import EnergyCounter
from polyrhythm.launch.process import (
    allow_descriptors,
    check_loopback,
    importable_main,
    leave_errors_to_python,
)
from polyrhythm.launch.signals import Preempted
from polyrhythm.launch.torchrun import started_rank as torchrun
from polyrhythm.launch.torchrun.report_rank import is_silent, leader_speaks, leads, started_by_torchrun
from polyrhythm.reporting.event_log import LOG_FILE, Observer
from polyrhythm.reporting.loggers import TRACE_FILE, StepTrace
from polyrhythm.reporting.quantities import counted, duration
from polyrhythm.roles.checkpointing.archive import FOLDER, Archive
from polyrhythm.roles.checkpointing.mirror import fetch_run
from polyrhythm.roles.job import Job
from polyrhythm.run_files import read_json_in_run
from polyrhythm.strategies.divided_network import HasStages
from polyrhythm.training.checkpoint import checkpoints
from polyrhythm.training.flat_optimizer import make_optimizers_quickly

if TYPE_CHECKING:  # it simulates, which takes a quarter of our imports, and one run in a hundred needs it
    from polyrhythm.api.rehearsal import Auto, Choice


@importable_main()
def train(
    recipe: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
    start_method: str = "spawn",
    **options: Unpack[RunOptions],
) -> Run | None:
    """Train a classifier on several workers.

    A script must call this below `if __name__ == "__main__":`, since workers import it again.

    Args:
        recipe: a YAML file of options.
        out: the run folder, new or empty; None: a new one under `runs/`.
        resume: the folder of a run to continue; `options` then change its configuration. `auto`: the run in `out` if
            there is one, else a new one; if it has nothing left to do, its figures are returned again.
        observers: receivers of every event, in this process.
        start_method: start method of local workers: `spawn`, or `fork` from a process that has not computed on several
            threads.
        **options: any field of `RunConfig`. `data` and `model` may be objects: a pair (train, test) of torch
            data sets or of (images, labels) tensors, and a module.

    Returns:
        The run; None in a rank of torchrun that does not lead.

    Raises:
        RequestError: the request is invalid; nothing has been written.
        RunError: the run failed.
    """
    _check_importable(start_method, options)
    leave_errors_to_python()
    # Under torchrun every rank checks the request; only rank 0 prints the error.
    with leader_speaks():
        again = is_automatic(resume)
        if again and out is not None and not (Path(out) / CONFIG_FILE).is_file():
            mirror = _configuration(recipe, None, options).checkpoint_mirror
            if mirror is not None:
                fetch_run(mirror, Path(out))
        out, resume = automatic(out, resume)
        config = _configuration(recipe, resume, options)
        config, about_size = _with_image_size(config) if resume is None else (config, "")
        asked = _Arguments(config, out, resume, again, observers, start_method)
        ensemble = Ensemble.parse(str(config.strategy))
        whole = None if ensemble is None else _ensemble(ensemble, asked, options)
    if whole is not None:
        return whole()
    with leader_speaks():
        refuse_distill(config)
        if started_by_torchrun() and _left_to_start(config) is not None:
            raise RequestError(
                "--strategy auto measures this machine, and torchrun may have more: name the strategy that "
                "`polyrhythm plan --cluster C.yaml` ranks first, with C.yaml as `profile` writes it under torchrun"
            )
        asked, choice = _decided(asked)
        asked = _with_copies(asked)
        stages = Stages.parse(str(asked.config.strategy))
        parts = None
        if stages is not None or by_noise(asked.config) is not None:
            parts = _part_by_part(stages, asked, options)
    if parts is not None:
        return parts()
    with leader_speaks():
        config = asked.config
        if started_by_torchrun():
            config = _with_torchruns_workers(config, options)
        config, remark = suited(config, alone=not started_by_torchrun())
        name = strategy_from(config.strategy, config.compress).name
        folder = replace(asked, config=config).folder(name)
        if config.fine_tuning != "none":
            done = finished_run(folder) if resume is not None else None
            if done is not None and not again:
                raise RequestError(
                    f"{folder} has ended its fine-tuning, which chooses its own epochs: a new run trains on with "
                    f"--model {name_of(config.model)} --weights {folder} --epochs N"
                )
            return done or FineTuning(train, config, folder, observers, start_method).run(remark)
        checkpointing = checkpoints_of(
            config,
            folder,
            resume=resume is not None and not has_no_checkpoint(folder, config),
            tested=None if resume is None else tested_epochs(folder, config.until),
        )
        job = assemble(config, checkpointing)
        # a late rank would read while checkpoints are written
        run = asked.done(finished(job) if checkpointing.resume and not is_silent() else None)
    if run is not None:
        if started_by_torchrun():
            torchrun.take_leave(config.gather_s)
        return run
    if config.freeze_epochs is not None:
        common = {"observers": observers, "start_method": start_method}
        return staged_finetuning(train, config, job.learning.epochs, folder, **common)
    if started_by_torchrun():
        return _train_under_torchrun(job, config, observers)
    check_loopback(config.port)
    allow_descriptors(config.workers + job.traits.servers)
    remarks = [remark, about_size]
    return _train_here(job, config, observers, start_method, choice=choice, remarks=remarks)


@dataclass(frozen=True)
class _Arguments:
    """Arguments of `train`.

    Attributes:
        config: configuration of the run.
        out: folder of a new run, if it was named.
        resume: folder of a run to resume, if any.
        again: whether the results of a run with nothing left to do are returned again; else it is refused.
        observers: see `train`.
        start_method: see `train`.

    Raises:
        RequestError: there are both folders.
    """

    config: RunConfig
    out: str | Path | None
    resume: str | Path | None
    again: bool
    observers: Sequence[Observer]
    start_method: str

    def __post_init__(self) -> None:
        if self.out is not None and self.resume is not None:
            raise RequestError("--out and --resume exclude each other: a resumed run stays in its folder")

    def with_strategy(self, strategy: str) -> _Arguments:
        """Return the same with another strategy."""
        return replace(self, config=self.config.model_copy(update={"strategy": strategy}))

    def folder(self, name: str) -> Path:
        """Return the folder of the run; a new one that was not named has this name and the network's."""
        if self.resume is None:
            if self.out is not None and is_silent():
                return Path(self.out)  # which the rank that leads looks at, and may have begun to fill by now
            return choose_folder(self.out, f"{name}-{name_of(self.config.model).split('(')[0]}")
        return Path(self.resume)

    def done(self, run: Run | None) -> Run | None:
        """Return a run that has nothing left to do, if there is one.

        Raises:
            RequestError: it is not to be returned again.
        """
        if run is not None and not self.again:
            raise all_done(run.folder, run.figures["epochs"])
        return run


def _with_image_size(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the configuration of a new run with the image size of its files, and a remark on one below the usual."""
    size = with_image_size(suited(config, alone=not started_by_torchrun())[0]).image_size
    if size == config.image_size or size is None:
        return config, ""
    remark = f"images are {size} pixels a side, by the size of their files; --image-size chooses another"
    return config.model_copy(update={"image_size": size}), remark if size < CENTRE else ""


def _decided(asked: _Arguments) -> tuple[_Arguments, Choice | None]:
    """Choose a run's strategy if that was left to its start; return what is asked then, and what was chosen."""
    auto = _left_to_start(asked.config)
    if auto is None:
        return asked, None
    if asked.resume is not None:
        raise RequestError("--strategy auto decides at a run's start: name the strategy to continue with")
    choice = auto.choose(asked.config, asked.start_method)
    return asked.with_strategy(choice.candidate.strategy), choice


def _with_copies(asked: _Arguments) -> _Arguments:
    """Choose how many copies stages have, by measured times, where the strategy leaves that to a run's start.

    A resumed run keeps its copies. Under torchrun, where no one process measures for all before they meet,
    and with several strategies, stages are balanced by FLOP count (`assemble`).
    """
    config = asked.config
    if Stages.parse(str(config.strategy)) is not None:
        return asked
    strategy = strategy_from(config.strategy, config.compress)
    if not (isinstance(strategy, HasStages) and strategy.chooses_copies):
        return asked
    if asked.resume is not None:
        was = str(configure(read_run_folder(Path(asked.resume))).strategy)
        if Stages.parse(was) is None and strategy.has_become(strategy_from(was)):
            return asked.with_strategy(was)
    if started_by_torchrun():
        return asked
    from polyrhythm.partition.outlook import seconds_of_pieces  # it traces networks, which others need not

    strategy.check(config.workers)
    dataset, device = data_of(config), devices_from(config.device, config.workers)[0]
    make_model = model_maker(config.model, dataset, config.weights, config.freeze)

    def measured(rows: int) -> Sequence[float]:
        method = "spawn" if device.type == "cuda" else asked.start_method
        arguments = (make_model, dataset.image_shape, rows, str(device))
        found: Sequence[float] = call_in_process(method, seconds_of_pieces, *arguments)
        return found

    images = config.workers * config.worker_batch
    chosen = strategy.with_copies(make_model, dataset.image_shape, config.workers, images, measured=measured)
    return asked.with_strategy(str(chosen))


def _left_to_start(config: RunConfig) -> Auto | None:
    """Return how the strategy is to be chosen; None: it was named."""
    strategy = str(config.strategy).strip()
    if not strategy.startswith(AUTOMATIC):
        return None
    from polyrhythm.api.rehearsal import Auto

    return Auto.parse(strategy)


def _part_by_part(stages: Stages | None, asked: _Arguments, options: RunOptions) -> Callable[[], Run | None]:
    """Return a function that trains one stage after the other; without stages, with batches that grow by noise.

    Raises:
        RequestError: the parts are impossible.
    """
    config, under_torchrun = asked.config, started_by_torchrun()
    if under_torchrun and stages is None:
        raise RequestError(
            "--batch-schedule auto restarts ranks when batches grow, which torchrun does not: take another"
        )
    first = config if stages is None else config.model_copy(update={"strategy": stages.stages[0].strategy})
    if suited(first, alone=not under_torchrun)[0].fine_tuning != "none":
        what = "stages" if stages is not None else "growing batches"
        raise RequestError(f"{what} train a whole network: give --fine-tuning none, or a single strategy")
    folder = asked.folder("stages" if stages is not None else "growing")
    done = finished_run(folder) if asked.resume is not None and not is_silent() else None
    reached = done is not None and config.until is not None and done.figures.get("reached")
    if done is not None and not (reached or done.figures["epochs"] >= (config.epochs or 0)):
        done = None
    done = asked.done(done)
    if under_torchrun:
        assert stages is not None, "growing batches are refused"
        staged = staged_run(stages, config, folder, partial(_with_torchruns_workers, options=options))
        return partial(_stages_under_torchrun, staged, config, asked.observers, done)
    if done is not None:
        return lambda: done
    check_loopback(config.port)

    def play(_number: int, job: Job, watching: Sequence[Observer], last: bool) -> Run:
        allow_descriptors(config.workers + job.traits.servers)
        return _train_here(job, config, watching, asked.start_method, reports=last)

    if stages is None:
        schedule = by_noise(config)
        assert schedule is not None, "there is one of both"
        return partial(with_growing_batches, schedule, config, folder, asked.observers, play)
    return partial(in_stages, staged_run(stages, config, folder), asked.observers, play)


def _stages_under_torchrun(
    staged: StagedRun, config: RunConfig, observers: Sequence[Observer], done: Run | None
) -> Run | None:
    """Make a run of stages in the processes that there are, or none of it where it is done."""
    parts = torchrun.Parts(torchrun.meet(), [_for_torchrun(job, config) for job in staged.jobs])
    if not leads():
        if torchrun.follow_parts(parts, _print_notices, config.threads, config.gather_s):
            raise Preempted(_TAKEN_AWAY)
        return None

    def play(number: int, job: Job, watching: Sequence[Observer], last: bool) -> Run:
        job = _for_torchrun(job, config)
        own = config.model_copy(update={"workers": job.workers})
        with _observed_with_trace(job, own, watching) as observed:
            preempted = torchrun.lead_part(
                parts, number, observed.claimed(job), observed.on_event, config.threads, config.gather_s
            )
            observed.skips_report = preempted or not last
        return replace(observed.run(), preempted=preempted)

    run = in_stages(staged, observers, play) if done is None else done
    if not run.preempted:
        torchrun.take_leave(min(config.gather_s, _LEAVE_S), parts.outside)
    return run


_TAKEN_AWAY = "the run was interrupted, since one of its hosts is taken away"
_LEAVE_S = 60.0
"""For which worker 0 waits for others at the end of stages, where it hosts their store."""


def _ensemble(ensemble: Ensemble, asked: _Arguments, options: RunOptions) -> Callable[[], Run | None]:
    """Return a function that trains several networks concurrently, and perhaps one that is distilled from them.

    Raises:
        RequestError: the members are impossible.
    """
    from polyrhythm.api import members  # no other run pays for it

    config, observers = asked.config, asked.observers

    def place() -> tuple[Path, Run | None]:
        folder = asked.folder("ensemble")
        return folder, asked.done(members.finished_ensemble(folder) if asked.resume is not None else None)

    def make(folder: Path, options: dict[str, Any], watching: Sequence[Observer]) -> Run | None:
        how: dict[str, Any] = {"observers": watching, "start_method": asked.start_method}
        return train(out=folder, resume=AUTOMATIC, **how, **options)

    if started_by_torchrun():
        shared = members.shared_ranks(ensemble, config, options.get("workers"))

        def make_of_ranks(folder: Path, options: dict[str, Any], watching: Sequence[Observer]) -> Run | None:
            return make(folder, {key: value for key, value in options.items() if key != "workers"}, watching)

        return partial(members.train_ensemble_of_ranks, ensemble, shared, place, observers, make_of_ranks)
    folder, done = place()
    if done is not None:
        return lambda: done
    return partial(
        members.train_ensemble, ensemble, config, folder, observers, partial(make, watching=observers)
    )


def _check_importable(start_method: str, options: Mapping[str, Any]) -> None:
    """Refuse to train from a line that spawned workers, which import the script, would execute again.

    Raises:
        RequestError: the call is not below an `if` that tests `__name__`; or the class of data or model is
            defined where it cannot be imported, as in a notebook.
    """
    if start_method != "spawn" or started_by_torchrun():
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_code.co_name != "<module>"
        or frame.f_globals.get("__name__") not in ("__main__", "__mp_main__")
    ):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename) if frame is not None else None
    if (
        frame is None or path is None or not path.is_file()
    ):  # typed in, or piped: nothing that could be imported
        if not hasattr(sys.modules["__main__"], "__file__"):
            _check_defined_elsewhere(options)
        return
    conditions = [each for each in ast.parse(path.read_bytes()).body if isinstance(each, ast.If)]
    guarded = any(
        isinstance(name, ast.Name) and name.id == "__name__" and condition.lineno <= frame.f_lineno
        for condition in conditions
        for name in ast.walk(condition.test)
    )
    if not guarded:
        raise RequestError(
            f"{path.name}, line {frame.f_lineno}: workers import this script again, so call polyrhythm.train below "
            'an `if __name__ == "__main__":`'
        )


class _DefinedInMain(ForkingPickler):
    """Collects the names of classes and functions of `__main__` that an object needs."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.names: list[str] = []

    def persistent_id(self, part: Any) -> str | None:
        if isinstance(part, type | FunctionType) and part.__module__ == "__main__":
            self.names.append(part.__qualname__)
        return "numbers" if isinstance(part, torch.Tensor | np.ndarray | bytes) else None


def _check_defined_elsewhere(options: Mapping[str, Any]) -> None:
    for name in ("model", "data"):
        pickler = _DefinedInMain()
        with suppress(Exception):  # objects that cannot be pickled are refused where they are sent
            pickler.dump(options.get(name))
        if pickler.names:
            raise RequestError(
                f"{name}: {pickler.names[0]} is defined in a notebook, or in a script from standard input, which "
                "workers cannot import: save it in a file next to it, such as mine.py, and write from mine import "
                f"{pickler.names[0]}"
            )


def _configuration(recipe: str | Path | None, resume: str | Path | None, options: RunOptions) -> RunConfig:
    layers = []
    if resume is not None:
        layers.append(_without_its_default(read_run_folder(Path(resume)), options))
    if recipe is not None:
        layers.append(read_recipe(Path(recipe)))
    config = configure(*layers, options)
    if resume is not None and (before := layers[0].get("updates")) != config.updates:
        asked = "none" if config.updates is None else config.updates
        raise RequestError(
            f"{resume} was begun with updates {before or 'none'}, and its last epoch and learning rates are for those: "
            f"updates {asked} needs a new run, which may start from its --weights"
        )
    return config


def _without_its_default(before: dict[str, Any], options: RunOptions) -> dict[str, Any]:
    """Return the options of a run without its strategy's default optimizer, for a change of strategy."""
    was = str(before.get("strategy"))
    staged = Stages.parse(was) is not None or Ensemble.parse(was) is not None
    if options.get("strategy") in (None, was) or staged:
        return before
    usual = default_optimizer(strategy_from(was, before.get("compress")), configure(before).workers)
    return {key: value for key, value in before.items() if key != "optimizer" or value != str(usual)}


_PATIENT_S = 1800.0
"""Seconds from which on something quicker is suggested."""
_MANY_NUMBERS = 10**8
_SMALL_SIDE = 32
"""Fewer numbers of images than that, or smaller images, are trained on before a step could be measured."""
_FEW_STEPS = 500
"""From random weights a network learns little in fewer."""
_LEAST_BATCH = 8


def expected_time(job: Job, seconds: float) -> str:
    """Return a sentence on how long a run takes on this machine, with what would be quicker where that is long."""
    learning, (_, height, width) = job.learning, job.dataset.image_shape
    notice = (
        f"about {duration(seconds)} on this machine, by one measured step: {learning.epochs} epochs of "
        f"{len(job.dataset.train):,} images at {height} by {width} pixels"
    )
    if seconds <= _PATIENT_S:
        return notice
    side = max(_SMALL_SIDE, min(height, width) // 2)
    smaller = duration(seconds * side * side / (height * width))
    return (
        f"{notice}. Quicker: --image-size {side} takes about {smaller} where the network allows it, and sees less; so "
        "do fewer --epochs or a smaller --model. On few photographs the backbone of a trained network is frozen at "
        "a small "
        "part of the time (--weights, --fine-tuning head)"
    )


def too_few_steps(job: Job, config: RunConfig) -> str | None:
    """Return the remedy for a run from random weights with too few steps; None: it has enough steps."""
    own = {"batch_size", "epochs", "updates", "batch_schedule"} & config.model_fields_set
    if config.weights is not None or own or not isinstance(source_of(config.data), ImageSource):
        return None
    steps = job.learning.epochs * job.steps_per_epoch
    if steps >= _FEW_STEPS:
        return None
    size = 2 ** int(log2(max(_LEAST_BATCH, config.batch_size * steps / _FEW_STEPS)))
    more = job.learning.epochs * -(-len(job.dataset.train) // (config.workers * size))
    return (
        f"{counted(steps, 'step')} in all, {counted(job.steps_per_epoch, 'step')} an epoch, are few for a network that "
        f"starts from random weights: --batch-size {size} makes {more:,} of the same images"
    )


def measured_time(job: Job, start_method: str) -> float | None:
    """Return a run's seconds, by one step of its network in a process of its own; None: it is soon done anyway."""
    shape, seen = job.dataset.image_shape, job.learning.epochs * len(job.dataset.train)
    if min(shape[1:]) < _SMALL_SIDE or seen * prod(shape) < _MANY_NUMBERS:
        return None
    forward_s, step_s = call_in_process(
        start_method, measure, job.make_model, shape, min(4, job.learning.batch_size), str(job.device)
    )
    return float(seen * step_s + job.learning.epochs * len(job.dataset.test) * forward_s)


def _train_here(
    job: Job,
    config: RunConfig,
    observers: Sequence[Observer],
    start_method: str,
    *,
    reports: bool = True,
    choice: Choice | None = None,
    remarks: Sequence[str] = (),
) -> Run:
    job, seconds = evaluated_here(job, config), None
    if isinstance(config.data, str | Path) and not job.checkpointing.resume:
        seconds = measured_time(job.planned, "spawn" if job.device.type == "cuda" else start_method)
    with (
        _observed_with_trace(job, config, observers) as observed,
        entrance_of(observed.claimed(job), config) as entrance,
    ):
        if choice is not None:
            observed.on_event(Notice(time_s=0, text=f"strategy auto takes {choice.reason}"))
            assert job.checkpointing.folder is not None
            from polyrhythm.api.rehearsal import write_prediction

            write_prediction(job.checkpointing.folder, choice.cluster, choice.candidate)
        notices = [*remarks, None if seconds is None else expected_time(job.planned, seconds)]
        if not job.checkpointing.resume:
            notices.append(too_few_steps(job.planned, config))
        for text in filter(None, notices):
            observed.on_event(Notice(time_s=0, text=text))
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

        # A restart needs a checkpoint; and guests would lose their places with the ranks that they are connected to.
        restarts = config.restarts if config.keep_checkpoints and entrance is None else 0
        preempted = run_restarting(observed.claimed(job), play, observed.on_event, restarts)
        observed.skips_report = preempted or not reports
    run = observed.run()
    if run.outcome == "done" and config.workers > 1 and method == "fork":
        _record_link(run)
    return replace(run, preempted=preempted and run.outcome == "interrupted")


_WORTH_MEASURING_S = 1.0
"""Length of a run from which a measurement of its link, some tenths of a second, is little next to it."""


def _record_link(run: Run) -> None:
    """Measure the link between two ranks of this host, and add it to the run's description of its machine."""
    if run.figures["seconds"] < _WORTH_MEASURING_S:
        return
    from polyrhythm.planning.link import measure_inside  # no other run pays for it

    path = run.folder / ENVIRONMENT_FILE
    with suppress(PolyrhythmError, OSError):  # the run is complete without it
        described = read_json_in_run(path)
        described["link"] = asdict(measure_inside("fork"))
        UNCLAIMED.write(path, json.dumps(described, indent=2) + "\n")


_BYTES_A_NUMBER, _HEADER_BYTES = 4, 1 << 14  # of a weights file


@contextmanager
def _observed_with_trace(job: Job, config: RunConfig, observers: Sequence[Observer]) -> Iterator[ObservedRun]:
    assert job.checkpointing.folder is not None
    with observed_run(job, config, observers) as observed:
        observed.reserve(job.checkpointing.folder / MODEL_FILE, _BYTES_A_NUMBER * job.numbers + _HEADER_BYTES)
        observed.energy = EnergyCounter()
        if config.timings:
            observed.add_observer(StepTrace(job.checkpointing.folder / TRACE_FILE, observed.claim))
        yield observed


def _with_torchruns_workers(config: RunConfig, options: RunOptions) -> RunConfig:
    workers = torchrun.workers_of(strategy_from(config.strategy, config.compress)) + config.vacant
    if options.get("workers") not in (None, workers):
        raise RequestError(
            f"torchrun's processes leave {workers} workers, not {options['workers']}: omit --workers"
        )
    return config.model_copy(update={"workers": workers})


def _for_torchrun(job: Job, config: RunConfig) -> Job:
    """Return a job on the device of this rank; its failed ranks are restarted by torchrun only.

    Raises:
        RequestError: it names devices.
    """
    if job.devices:
        raise RequestError(
            f"device {config.device}: started by torchrun, each worker takes what its own host has: give auto"
        )
    allow_descriptors(job.workers + job.traits.servers)
    job = with_place_of_tests(job, config)
    tolerance = replace(job.fault_tolerance, restarts=0)
    return replace(job, device=torchrun.device_of(job.device), fault_tolerance=tolerance)


def _train_under_torchrun(job: Job, config: RunConfig, observers: Sequence[Observer]) -> Run | None:
    job = _for_torchrun(job, config)
    if not leads():
        if torchrun.run_under_torchrun(
            job, _print_notices, config.threads, admission_of(job, config), config.gather_s
        ):
            raise Preempted(_TAKEN_AWAY)
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
    return replace(observed.run(), preempted=preempted)


def _print_notices(event: Event) -> None:
    """Print the notices of the watchdog in a rank that does not lead."""
    if isinstance(event, Notice):
        print(f"notice: {event.text}", file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Limit this process to one compute thread, so that workers can be forked from it safely, and starts quickly."""
    torch.set_num_threads(1)
    make_optimizers_quickly()


AUTOMATIC = "auto"
"""Instead of a folder to resume from: the run in the folder of `out`, if there is one."""


def is_automatic(resume: str | Path | None) -> bool:
    """Whether to resume whatever run there is."""
    return str(resume) == AUTOMATIC


def automatic(
    out: str | Path | None, resume: str | Path | None
) -> tuple[str | Path | None, str | Path | None]:
    """Resolve `resume="auto"`: return the folders of a new run and of one to continue; at most one is given.

    Raises:
        RequestError: the folder of the run is not given.
    """
    if not is_automatic(resume):
        return out, resume
    if out is None:
        raise RequestError("--resume auto looks for a run in the folder of --out: name it")
    return (None, out) if (Path(out) / CONFIG_FILE).is_file() else (out, None)


def has_no_checkpoint(folder: Path, config: RunConfig) -> bool:
    """Whether a run that keeps checkpoints died before its first one.

    Args:
        folder: folder of the run.
        config: configuration of the run.
    """
    begun = any((folder / name).exists() for name in (LOG_FILE, "environment.json"))
    return begun and config.keep_checkpoints > 0 and not checkpoints(folder / FOLDER)


def finished(job: Job) -> Run | None:
    """Return a run that has nothing left to do, as it ended; None if it has.

    Raises:
        RequestError: there is nothing to resume from, or no record of how it ended.
    """
    folder = job.checkpointing.folder
    assert folder is not None, "a resumed run has a folder"
    run = finished_run(folder)
    if run is not None and not checkpoints(folder / FOLDER) and run.figures["epochs"] >= job.learning.epochs:
        return run  # it kept none, and needs none
    if run is not None and job.until is not None and run.figures.get("reached"):
        return run
    snapshot = Archive(job).load()
    if snapshot.epoch < job.learning.epochs:
        return None
    if not (folder / LOG_FILE).exists():
        raise all_done(folder, snapshot.epoch)
    return run


def all_done(folder: Path, epochs: int) -> RequestError:
    """Return the error for resuming a run that has nothing left to do."""
    return RequestError(f"{folder} has done its {epochs} epochs: ask for more with --epochs to continue")


def staged_finetuning(
    train: Callable[..., Run | None],
    config: RunConfig,
    epochs: int,
    folder: Path,
    **how: Any,
) -> Run | None:
    """Train in two phases.

    Args:
        train: function that trains a run, as `polyrhythm.train`.
        config: configuration of both phases together.
        epochs: epochs of both phases together.
        folder: folder of the second run; the first's is next to it.
        **how: `observers` and `start_method`, see `train`.

    Returns:
        The second run, or the first if it was interrupted.

    Raises:
        RequestError: the phases are impossible.
    """
    frozen_epochs = config.freeze_epochs
    assert frozen_epochs is not None
    if config.updates is not None:
        raise RequestError("--freeze-epochs counts epochs of two runs: give --epochs in place of --updates")
    if config.freeze == "none":
        raise RequestError(
            "--freeze-epochs is a duration, and nothing is frozen: give --freeze body, or names"
        )
    if frozen_epochs >= epochs:
        raise RequestError(
            f"--freeze-epochs {frozen_epochs} leaves none of {epochs} epochs for all: give more --epochs"
        )
    if started_by_torchrun():
        raise RequestError(
            "--freeze-epochs is two runs: under torchrun start one with --freeze, then one with --weights"
        )
    options = {name: getattr(config, name) for name in type(config).model_fields}
    first_folder = folder.with_name(f"{folder.name}-frozen")
    observers: Sequence[Observer] = how.pop("observers")
    first = train(
        out=first_folder,
        observers=[Lasting(each) for each in observers],
        **how,
        **{**options, "freeze_epochs": None, "epochs": frozen_epochs},
    )
    if first is None or first.outcome != "done":
        return first
    changed = {"freeze": "norms", "freeze_epochs": None, "weights": str(first_folder)}
    return train(
        out=folder, observers=observers, **how, **{**options, **changed, "epochs": epochs - frozen_epochs}
    )
