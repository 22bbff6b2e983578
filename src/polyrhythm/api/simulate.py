"""Simulating a run, as the verb `simulate` does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.api import run_folder
from polyrhythm.api.told import Run, told_run
from polyrhythm.config.assemble import assemble, name_of
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, RunEnded
from polyrhythm.launch.cores import computing_with
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.reporting.observer import Observer
from polyrhythm.roles.job import Job, Keeping
from polyrhythm.roles.world import StopWish
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.cluster_file import cluster_text, open_cluster
from polyrhythm.simulation.layout import Layout, lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.simulation.step_time import STEP_TIMES, StepTime
from polyrhythm.simulation.tempo import check_slowness
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.specs import build

CLUSTER_FILE = "cluster.yaml"
TRACE_FILE = "trace.json"


def simulate(
    recipe: str | Path | None = None,
    *,
    cluster: str | Path | Cluster,
    step_time: str | StepTime | None = None,
    out: str | Path | None = None,
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Run:
    """Trains a classifier on a cluster that is only described: real gradients, virtual time, one process.

    The run folder is that of a real run, in virtual seconds, with the cluster and `trace.json`, a timeline that
    Perfetto and chrome://tracing show. The same seed gives the same run.

    Args:
        recipe: a YAML file of options.
        cluster: the name of a ready cluster, a cluster file, or a cluster.
        step_time: compute time of a step instead of the cluster's, such as `constant(seconds=0.1)`.
        out: the run folder, new or empty; None makes one under `runs/`.
        observers: are told every event.
        **options: any field of `RunConfig` but `port`, as in `train`.

    Returns:
        The run; its figures have `cluster`, `hosts` and `price` too.

    Raises:
        RequestError: something in the request is wrong; nothing has been written.
        RunError: the run failed, by a deadlock for example.
    """
    if "port" in options:
        raise RequestError("simulated ranks meet at no port: leave --port out")
    config = configure(read_recipe(Path(recipe)) if recipe is not None else {}, options)
    where = _cluster(cluster, step_time)
    job = assemble(config, Keeping(checkpoints=config.keep_checkpoints))
    strategy = job.strategy
    layout = lay_out(where, job.workers, strategy.server_count, strategy.server_placement)
    check_slowness(layout)
    folder = run_folder.choose(out, f"{strategy.name}-{name_of(config.model).split('(')[0]}-{where.name}")
    job = dataclasses.replace(job, keeping=dataclasses.replace(job.keeping, folder=folder))
    with computing_with(config.threads or 1):
        return _played(layout, job, config, observers)


def _cluster(cluster: str | Path | Cluster, step_time: str | StepTime | None) -> Cluster:
    found = cluster if isinstance(cluster, Cluster) else open_cluster(cluster)
    if step_time is None:
        return found
    made = step_time if isinstance(step_time, StepTime) else build("step time", step_time, STEP_TIMES)
    return found.model_copy(update={"step_time": made})


def _played(layout: Layout, job: Job, config: RunConfig, observers: Sequence[Observer]) -> Run:
    folder, cast = job.keeping.folder, layout.cast
    assert folder is not None
    stop, timeline = StopWish(), Timeline()
    with told_run(job, config, observers) as told:
        (folder / CLUSTER_FILE).write_text(cluster_text(layout.cluster), encoding="utf-8")
        with asked_to_stop(stop.wish):
            simulate_on(layout, job, _priced(layout, told.on_event), stop=stop, timeline=timeline)
    names = {rank: f"worker {index}" for index, rank in enumerate(cast.workers)}
    names |= {rank: f"server {index}" for index, rank in enumerate(cast.servers)}
    machines = layout.cluster.machines
    hosts = {rank: (host, f"host {host} ({machines[host].name})") for rank, host in enumerate(layout.host_of)}
    timeline.write(folder / TRACE_FILE, names, hosts)
    return told.run()


def _priced(layout: Layout, emit: Callable[[Event], None]) -> Callable[[Event], None]:
    """Adds what only the cluster knows to the figures of a run."""

    def pass_on(event: Event) -> None:
        if isinstance(event, RunEnded):
            price = event.result["seconds"] / 3600 * layout.price_per_hour
            known = {"cluster": layout.cluster.name, "hosts": len(layout.hosts_used), "price": price}
            event = dataclasses.replace(event, result={**event.result, **known})
        emit(event)

    return pass_on
