"""Simulating a run, as the verb `simulate` does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from polyrhythm.api import run_folder
from polyrhythm.api.cluster_figures import ClusterFigures, watched_ranks
from polyrhythm.api.observed_run import ObservedRun, Run, observed_run, observed_run_in
from polyrhythm.config.assemble import assemble
from polyrhythm.config.model import name_of
from polyrhythm.config.options import RunOptions, refuse_real_only
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.config.rehearsal import assemble_rehearsal, check_rehearsable
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError, unknown
from polyrhythm.events import Event
from polyrhythm.launch.cores import computing_with
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.reporting.observer import Observer
from polyrhythm.roles.job import Job, Keeping
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.cluster_file import cluster_text, open_cluster
from polyrhythm.simulation.injection.fault import Fault, parse_faults
from polyrhythm.simulation.layout import Layout, lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.simulation.step_time import STEP_TIMES, StepTime
from polyrhythm.simulation.tempo import check_slowness
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.simulation.trials import Trial
from polyrhythm.simulation.trials import play as play_trial
from polyrhythm.specs import build

CLUSTER_FILE = "cluster.yaml"
TRACE_FILE = "trace.json"
GRADIENTS = ("real", "none")


def simulate(  # noqa: PLR0913 - what a user may say, all by name
    recipe: str | Path | None = None,
    *,
    cluster: str | Path | Cluster,
    gradients: str = "real",
    steps: int | None = None,
    step_time: str | StepTime | None = None,
    faults: str | Sequence[str | Fault] = (),
    check: bool = False,
    out: str | Path | None = None,
    observers: Sequence[Observer] = (),
    **options: Unpack[RunOptions],
) -> Run:
    """Trains a classifier on a cluster that is only described: virtual time, one process.

    The run folder is that of a real run, in virtual seconds, with the cluster and `trace.json`, a timeline that
    Perfetto and chrome://tracing show. The same seed gives the same run.

    Args:
        recipe: a YAML file of options.
        cluster: the name of a ready cluster, a cluster file, or a cluster.
        gradients: `real` trains; `none` rehearses: the strategy's messages in their sizes, and nothing learned, for
            thousands of workers. A recipe's options for learning are then not looked at.
        steps: that every worker takes, of full batches, instead of epochs; with `gradients="none"` only.
        step_time: compute time of a step instead of the cluster's, such as `constant(seconds=0.1)`.
        faults: what goes wrong beside the cluster's own faults, such as `kill(rank=1, at_s=2); slow(rank=2, factor=3)`.
        check: with `gradients="none"` only: watches the strategy's invariants, with gradients of whole numbers and full
            batches; one that is broken ends the run.
        out: the run folder, new or empty; None makes one under `runs/`.
        observers: get every event.
        **options: any field of `RunConfig` but those of `REAL_ONLY`, as in `train`.

    Returns:
        The run; its figures have `gradients`, `waiting_share`, `cluster`, `hosts` and `price` too.

    Raises:
        RequestError: something in the request is wrong; nothing has been written.
        RunError: the run failed, by a deadlock for example.
    """
    refuse_real_only(options)
    if gradients not in GRADIENTS:
        raise unknown("gradients", gradients, GRADIENTS)
    if gradients == "none":
        check_rehearsable(options, steps)
    elif steps is not None:
        raise RequestError("--steps goes with --gradients none: real training is as long as its --epochs")
    if check and gradients != "none":
        raise RequestError("--check goes with --gradients none: it counts gradients of whole numbers")
    config = configure(read_recipe(Path(recipe)) if recipe is not None else {}, options)
    where = described_cluster(cluster, step_time, faults)
    if gradients == "none":
        return _rehearse(where, config, steps, check, out, observers)
    return _train(where, config, out, observers)


def described_cluster(
    cluster: str | Path | Cluster, step_time: str | StepTime | None, faults: str | Sequence[str | Fault]
) -> Cluster:
    """Gives a cluster, with what else was said of it.

    Raises:
        RequestError: there is no such cluster, step time or fault.
    """
    found = cluster if isinstance(cluster, Cluster) else open_cluster(cluster)
    found = found.model_copy(update={"faults": (*found.faults, *parse_faults(faults))})
    if step_time is None:
        return found
    made = step_time if isinstance(step_time, StepTime) else build("step time", step_time, STEP_TIMES)
    return found.model_copy(update={"step_time": made})


def _train(where: Cluster, config: RunConfig, out: str | Path | None, observers: Sequence[Observer]) -> Run:
    job = assemble(config, Keeping(checkpoints=config.keep_checkpoints, best=config.keep_best))
    layout = laid_out(where, job)
    folder = _folder(out, job, config, where)
    job = dataclasses.replace(job, keeping=dataclasses.replace(job.keeping, folder=folder))

    with computing_with(config.threads or 1), observed_run(job, config, observers) as observed:
        claimed = observed.claimed(job)

        def play(emit: Callable[[Event], None], stop: StopRequest, timeline: Timeline) -> None:
            simulate_on(layout, claimed, emit, stop=stop, timeline=timeline)

        _played(layout, folder, observed, play, {"gradients": "real"})
    return observed.run()


def _rehearse(
    where: Cluster,
    config: RunConfig,
    steps: int | None,
    check: bool,
    out: str | Path | None,
    observers: Sequence[Observer],
) -> Run:
    rehearsal, images = assemble_rehearsal(config, steps)
    layout = laid_out(where, rehearsal)
    trial = Trial(layout=layout, rehearsal=rehearsal, faults=(), check=check)
    folder = _folder(out, rehearsal, config, where)

    def play(emit: Callable[[Event], None], stop: StopRequest, timeline: Timeline) -> None:
        play_trial(trial, rehearsal.seed, emit, stop=stop, timeline=timeline)

    if steps is None:
        config = config.model_copy(update={"epochs": rehearsal.epochs})
    known: dict[str, Any] = {"gradients": "none", "run": str(folder)}
    if steps is not None:
        known["epochs"] = round(steps * config.workers * config.batch_size / images, 3)
    claim = run_folder.create_for(folder, config, "none")
    with computing_with(1), observed_run_in(folder, config, observers, claim) as observed:
        _played(layout, folder, observed, play, known)
    return observed.run()


def laid_out(where: Cluster, what: Job | Rehearsal) -> Layout:
    """Gives every rank its host.

    Raises:
        RequestError: it does not fit, or the cluster slows or loses what is not there.
    """
    strategy = what.strategy
    layout = lay_out(where, what.workers, strategy.server_count, strategy.server_placement)
    hosts = {layout.host_of[rank] for rank in layout.cast.workers}
    if strategy.one_host and len(hosts) > 1:
        raise RequestError(
            f"{strategy.name} needs memory that all workers share, and they are on {len(hosts)} hosts: take a cluster "
            "of one host, or take parameter_server or downpour"
        )
    check_slowness(layout)
    for fault in where.faults:
        fault.check(layout)
    return layout


def _folder(out: str | Path | None, what: Job | Rehearsal, config: RunConfig, where: Cluster) -> Path:
    model = name_of(config.model).split("(")[0]
    return run_folder.choose(out, f"{what.strategy.name}-{model}-{where.name}")


def _played(
    layout: Layout,
    folder: Path,
    observed: ObservedRun,
    play: Callable[[Callable[[Event], None], StopRequest, Timeline], None],
    known: dict[str, Any],
) -> None:
    """Plays, and leaves the cluster and the timeline in the run folder."""
    stop, timeline = StopRequest(), Timeline(watched_ranks(layout))
    (folder / CLUSTER_FILE).write_text(cluster_text(layout.cluster), encoding="utf-8")
    with asked_to_stop(stop.request):
        play(ClusterFigures(layout, known, timeline, observed.on_event).on_event, stop, timeline)
    cast = layout.cast
    names = {rank: f"worker {index}" for index, rank in enumerate(cast.workers)}
    names |= {rank: f"server {index}" for index, rank in enumerate(cast.servers)}
    machines = layout.cluster.machines
    hosts = {rank: (host, f"host {host} ({machines[host].name})") for rank, host in enumerate(layout.host_of)}
    timeline.write(folder / TRACE_FILE, names, hosts)
