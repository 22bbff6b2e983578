"""Simulated runs, for the verb `simulate`: one run, or a strategy under the faults of many seeds.

A simulated run has the figures of a real one, and some that only a simulation knows (waiting share, hosts,
price). `try_strategy`, for `simulate --seeds`, makes dry runs of a strategy with many seeds under faults
while its invariants are checked.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from polyrhythm.api.evaluation_place import evaluated_on
from polyrhythm.api.growing import by_noise, with_growing_batches
from polyrhythm.api.members import simulate_ensemble
from polyrhythm.api.observed_run import (
    ObservedRun,
    Run,
    choose_folder,
    create_folder_for,
    observed_run,
    observed_run_in,
)
from polyrhythm.api.stages import in_stages, staged_run
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import assemble, checkpoints_of, opened, optimizer_from, strategy_from
from polyrhythm.config.dry_run import (
    assemble_dry_run,
    check_dry_run_options,
    is_fixed,
    multiply_adds_by_name,
)
from polyrhythm.config.ensemble import Ensemble, refuse_distill
from polyrhythm.config.image_size import with_image_size
from polyrhythm.config.model import name_of, shapes_of
from polyrhythm.config.recipe import as_command, configure, read_recipe
from polyrhythm.config.run_config import RunConfig, RunOptions, refuse_real_only
from polyrhythm.config.stages import Stages
from polyrhythm.data.balances.off import Off
from polyrhythm.errors import RequestError, unknown
from polyrhythm.events import Event, Notice, RunEnded, RunStarted, WorkerProgress
from polyrhythm.launch.devices import computing_with
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.partition.outlook import Pace, PipelineForecast
from polyrhythm.planning.analysis import step_multiply_adds
from polyrhythm.planning.limits import limits_of
from polyrhythm.reporting.event_log import Observer
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.cluster import Cluster, StepWork, cluster_text, doubts_of_steps, open_cluster
from polyrhythm.simulation.fitted import value_of, with_values
from polyrhythm.simulation.injection.fault import Fault, parse_faults
from polyrhythm.simulation.layout import Layout, lay_out
from polyrhythm.simulation.run import simulate_dry_on, simulate_on
from polyrhythm.simulation.simulated_run import Wiring, check_slowness
from polyrhythm.simulation.step_time import STEP_TIMES, StepTime, generator_for_rank
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.simulation.trials import Failure, Trial, Tried, try_seeds
from polyrhythm.simulation.trials import play as play_trial
from polyrhythm.specs import build
from polyrhythm.strategies.compressing import compressor_of, payoff_of
from polyrhythm.strategies.divided_network import HasStages
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

_log = logging.getLogger(__name__)
CLUSTER_FILE = "cluster.yaml"
TRACE_FILE = "trace.json"
GRADIENTS = ("real", "none")


def simulate(
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
    """Train a classifier on a described cluster: virtual time, one process.

    The run folder is like that of a real run, in virtual seconds, with the cluster and `trace.json`, a timeline for
    Perfetto and chrome://tracing. The same seed repeats the same run.

    Args:
        recipe: a YAML file of options.
        cluster: the name of a ready cluster, a cluster file, or a cluster.
        gradients: `real` trains; `none` is a dry run: the strategy's messages in their sizes without training, for
            thousands of workers. A recipe's options for training are then ignored.
        steps: full batches that every worker takes, instead of epochs; with `gradients="none"` only.
        step_time: compute time of a step instead of the cluster's, such as `constant(seconds=0.1)`.
        faults: faults in addition to the cluster's own, such as `kill(rank=1, at_s=2); slow(rank=2, factor=3)`.
        check: whether the strategy's invariants are checked (with `gradients="none"` only), with gradients of whole
            numbers and full batches; a violation ends the run.
        out: the run folder, new or empty; None: a new one under `runs/`.
        observers: receivers of every event.
        **options: any field of `RunConfig` but those of `REAL_ONLY`, as in `train`.

    Returns:
        The run; its figures include `gradients`, `waiting_share`, `nothing_left_share`, `cluster`, `hosts` and `price`.

    Raises:
        RequestError: the request is invalid; nothing has been written.
        RunError: the run failed, by a deadlock for example.
    """
    refuse_real_only(options)
    if gradients not in GRADIENTS:
        raise unknown("gradients", gradients, GRADIENTS)
    if gradients == "none":
        check_dry_run_options(options, steps)
    elif steps is not None:
        raise RequestError("--steps goes with --gradients none: real training is as long as its --epochs")
    if check and gradients != "none":
        raise RequestError("--check goes with --gradients none: it counts gradients of whole numbers")
    config = with_image_size(configure(read_recipe(Path(recipe)) if recipe is not None else {}, options))
    where = described_cluster(cluster, step_time, faults)
    if step_time is None:
        where = paced_for(where, config)
    asked = _Arguments(where, config, gradients == "real", steps, check, out, observers)
    ensemble = Ensemble.parse(str(config.strategy))
    if ensemble is not None:
        return _simulate_ensemble(ensemble, asked, paced=step_time is None)
    refuse_distill(config)
    return _simulate(asked)


@dataclass(frozen=True)
class _Arguments:
    """Arguments of `simulate`.

    Attributes:
        where: the cluster.
        config: configuration of the run.
        learns: whether gradients are computed; else it is a dry run.
        steps: see `simulate`.
        check: see `simulate`.
        out: see `simulate`.
        observers: see `simulate`.
    """

    where: Cluster
    config: RunConfig
    learns: bool
    steps: int | None
    check: bool
    out: str | Path | None
    observers: Sequence[Observer]


def _folder(asked: _Arguments, strategy: str) -> Path:
    """Return the folder of a run; a new one that was not named is called by strategy, network and cluster."""
    model = name_of(asked.config.model).split("(")[0]
    return choose_folder(asked.out, f"{strategy}-{model}-{asked.where.name}")


def described_cluster(
    cluster: str | Path | Cluster, step_time: str | StepTime | None, faults: str | Sequence[str | Fault]
) -> Cluster:
    """Return a cluster with the given step time and additional faults.

    Raises:
        RequestError: there is no such cluster, step time or fault.
    """
    found = cluster if isinstance(cluster, Cluster) else open_cluster(cluster)
    found = found.model_copy(update={"faults": (*found.faults, *parse_faults(faults))})
    if step_time is None:
        return found
    made = step_time if isinstance(step_time, StepTime) else build("step time", step_time, STEP_TIMES)
    found = found.model_copy(update={"step_time": made, "step_of": None, "step_factor": 1.0})
    for doubt in doubts_of_steps(found):
        _log.warning("step time: %s", doubt)
    return found


def paced_for(where: Cluster, config: RunConfig) -> Cluster:
    """Return a cluster with step times for a run's network and batch, as far as the cluster defines them.

    A warning is logged where its step time is that of another network, or batch, than the run's, or where the time or
    size of the network's steps does not follow from its shapes.

    Raises:
        RequestError: the run's data or model is not available, or its steps cannot be predicted from the cluster's.
    """
    _check_precision(where, config)
    of = where.step_of
    model = name_of(config.model).split("(")[0]
    limits = network_limits(config)
    if of is None:
        _log_limits(model, limits)
        return where
    other = [of.model] if of.model and of.model.split("(")[0] != model else []
    same_batch = of.batch_size in (None, config.worker_batch)
    elsewhere = not of.model or bool(other)
    if (limits and elsewhere) or (of.limits and (elsewhere or not same_batch)):
        raise RequestError(
            f"cluster {where.name}: its step time, of {of.model or 'another network'} at a batch of "
            f"{of.batch_size or 'any size'}, does not give that of {model} at a batch of {config.worker_batch} "
            f"({(*limits, *of.limits)[0].partition(':')[0]}): measure that with `polyrhythm profile`, or give "
            "--step-time"
        )
    _log_limits(model, dict.fromkeys((*limits, *of.limits)))
    if of.factor(1.0) is None:
        if of.batch_size is not None and of.batch_size != config.worker_batch:
            other.append(f"a batch of {of.batch_size}")
        if other:
            _log.warning(
                "cluster %s: its step time is that of %s, and is taken for %s at a batch of %d as it is: measure that "
                "with `polyrhythm profile`, or give --step-time",
                where.name,
                " at ".join(other),
                model,
                config.worker_batch,
            )
        return where
    factor = of.factor(multiply_adds_of(config))
    assert factor is not None
    if of.layers and not same_batch:
        other.append(f"a batch of {of.batch_size}")
    if other:
        _log.warning(
            "cluster %s: step times of %s follow from those of %s by their arithmetic alone: `polyrhythm profile` "
            "measures them",
            where.name,
            model if elsewhere else f"a batch of {config.worker_batch}",
            other[0],
        )
    return where.model_copy(update={"step_factor": factor})


def _check_precision(where: Cluster, config: RunConfig) -> None:
    """Reject a requested precision other than that of the cluster's step; log a warning where that is unknown.

    Compute does not become faster by a factor that follows from the precision. Gradients stay in float32, unless
    `transfer` or `compress` has another.
    """
    measured = where.step_of.precision if where.step_of is not None else ""
    if config.precision in ("auto", measured):
        return
    remedy = (
        f"only a measurement gives the time in {config.precision}: `polyrhythm profile --precision "
        f"{config.precision}`, or --step-time"
    )
    if measured:
        raise RequestError(f"cluster {where.name}: its steps were computed in {measured}; {remedy}")
    if config.precision != "float32":
        _log.warning("cluster %s: the precision of its steps is unknown; %s", where.name, remedy)


def network_limits(config: RunConfig) -> tuple[str, ...]:
    """Return why the steps of a run's network do not follow from its shapes; empty for networks with a name."""
    if is_fixed(config.model):
        return ()
    dataset = opened(config)
    shape = dataset.image_shape
    return limits_of(shapes_of(config.model, len(dataset.classes), shape), shape)


def _log_limits(model: str, limits: Iterable[str]) -> None:
    for reason in limits:
        _log.warning("%s: %s", model, reason)


def at_its_pace(where: Cluster, config: RunConfig) -> Cluster:
    """Return the cluster of a run, marked as having that run's step time: other batches follow by arithmetic.

    Args:
        where: the cluster; unchanged if it defines how step times depend on the network.
        config: configuration of the run.

    Raises:
        RequestError: the run's data or model is not available.
    """
    if where.step_of is not None and where.step_of.factor(1.0) is not None:
        return where
    work = multiply_adds_of(config) / where.step_factor
    of = StepWork(
        model=name_of(config.model),
        batch_size=config.worker_batch,
        precision="" if config.precision == "auto" else config.precision,
        multiply_adds=work,
    )
    return where.model_copy(update={"step_of": of})


def with_stages_settled(where: Cluster, config: RunConfig) -> tuple[RunConfig, PipelineForecast | None]:
    """Return a configuration with fixed stage bounds, and the forecast of the stages.

    Args:
        where: the cluster.
        config: configuration of the run; unchanged where its workers hold no stages, or where it sets their
            bounds itself.

    Raises:
        RequestError: the network cannot be cut so, or a host has not the memory for the stages of its workers.
    """
    if Stages.parse(str(config.strategy)) is not None:
        return config, None
    strategy = strategy_from(config.strategy, config.compress)
    if not isinstance(strategy, HasStages):
        return config, None
    strategy.check(config.workers)
    dataset = opened(config)
    model = shapes_of(config.model, len(dataset.classes), dataset.image_shape)
    made = optimizer_from(config, strategy).create(
        [each for each in model.parameters() if each.requires_grad]
    )
    flat = FlatParameters(model)
    traits = strategy.traits(config.workers)
    layout = lay_out(where, config.workers, traits.servers, traits.placement)
    image = flat.vector.new_zeros(1, *dataset.image_shape)
    asked, images = strategy, config.workers * config.worker_batch // traits.pipelines
    strategy = asked.with_copies(
        lambda: model,
        dataset.image_shape,
        config.workers,
        images,
        lambda ranks: pace_of(layout, config.seed, ranks),
    )
    assert isinstance(strategy, HasStages)
    ranks, machines = strategy.workers_of_ranks(config.workers), where.machines
    beside = Counter(layout.host_of[worker] for worker in layout.roles.workers)

    def room(workers: range) -> float:
        hosts = [layout.host_of[worker] for worker in workers]
        return min((machines[host].memory_bytes or math.inf) / beside[host] for host in hosts)

    plan, pace = OptimizerPlan.of(made, flat), pace_of(layout, config.seed, ranks)
    settled, outlook = strategy.settled(
        model, image, config.workers, images, plan, pace, [room(rank) for rank in ranks]
    )
    if settled is not asked:
        config = config.model_copy(update={"strategy": str(settled)})
    return config, outlook


def pace_of(layout: Layout, seed: int, ranks: Sequence[range]) -> Pace:
    """Return how fast the ranks of a pipeline and their links are, on average.

    Args:
        layout: layout of the workers.
        seed: seed of the run.
        ranks: the workers with the copies of each rank's stages; the slowest counts.
    """
    links = Wiring(layout)
    generator, drawn = generator_for_rank(seed, 0), layout.cluster.step_time
    mean_s = sum(drawn.draw(generator) for _ in range(_DRAWS)) / _DRAWS
    means = [
        mean_s * layout.step_factor(rank) * layout.cluster.slow.get(rank, 1.0)
        for rank in layout.roles.workers
    ]
    routes = [links.route(ranks[at][0], ranks[(at + 1) % len(ranks)][0]) for at in range(len(ranks))]
    return Pace(
        tuple(max(means[worker] for worker in workers) for workers in ranks),
        tuple(route.latency_s for route in routes),
        tuple(min(links.bandwidths[link] for link in route.links) for route in routes),
    )


_DRAWS = 200
"""Number of drawn step times for their mean."""


def multiply_adds_of(config: RunConfig) -> float:
    """Return the multiply-adds of a worker's step, forward and backward.

    Raises:
        RequestError: the run's data or model is not available.
    """
    dataset = opened(config)
    classes, shape, batch = len(dataset.classes), dataset.image_shape, config.worker_batch
    if is_fixed(config.model):
        return multiply_adds_by_name(config.model, classes, shape) * batch
    return step_multiply_adds(shapes_of(config.model, classes, shape), shape, batch)


def _simulate(asked: _Arguments) -> Run:
    """Simulate one network's run."""
    config, foreseen = with_stages_settled(asked.where, asked.config)
    asked = replace(asked, config=config)
    if not asked.learns:
        return _dry_run(asked, foreseen)
    stages = Stages.parse(str(config.strategy))
    if stages is not None or by_noise(config) is not None:
        return _train_in_stages(stages, asked)
    job = assemble(config, checkpoints_of(config))
    folder = _folder(asked, job.strategy.name)
    job = replace(job, checkpointing=replace(job.checkpointing, folder=folder))
    return _play(laid_out(asked.where, job), job, config, asked.observers, foreseen=foreseen)


def _simulate_ensemble(ensemble: Ensemble, asked: _Arguments, *, paced: bool) -> Run:
    """Simulate networks side by side, and perhaps one that learns from them.

    Args:
        ensemble: the networks.
        asked: arguments for all of them.
        paced: whether steps take as long as the network of `asked` needs.
    """
    config, folder = asked.config, _folder(asked, "ensemble")
    if not asked.learns:  # set in a recipe for training
        config = config.model_copy(update={"distill": None})

    def play(part: Cluster, member: RunConfig, place: Path, watching: Sequence[Observer]) -> Run:
        if paced and member.model != config.model:
            part = paced_for(part, member)
        return _simulate(replace(asked, where=part, config=member, out=place, observers=watching))

    return simulate_ensemble(
        ensemble, asked.where, config, folder, asked.observers, play, learns=asked.learns
    )


def _train_in_stages(stages: Stages | None, asked: _Arguments) -> Run:
    """Train with one strategy after the other, or without stages with batches that grow by noise.

    Raises:
        RequestError: the cluster has events at given times, which every stage would count from its own start.
    """
    where, config = asked.where, asked.config
    if where.faults or where.passing_slowness:
        raise RequestError(
            f"faults and passing slowness of cluster {where.name} name times of one strategy's run, and stages are "
            "several: leave them out"
        )
    folder = _folder(asked, "stages" if stages is not None else "growing")
    spent: list[tuple[float, float | None]] = []  # seconds so far, and their price

    def play(_number: int, job: Job, watching: Sequence[Observer], last: bool) -> Run:
        before = spent[-1] if spent else (0.0, 0.0)
        run = _play(laid_out(where, job), job, config, watching, before=before, reports=last)
        spent.append((run.figures["seconds"], run.figures["price"]))
        return run

    if stages is None:
        schedule = by_noise(config)
        assert schedule is not None, "there is one of both"
        return with_growing_batches(schedule, config, folder, asked.observers, play)
    return in_stages(staged_run(stages, config, folder), asked.observers, play)


def _play(
    layout: Layout,
    job: Job,
    config: RunConfig,
    observers: Sequence[Observer],
    *,
    before: tuple[float, float | None] = (0.0, 0.0),
    reports: bool = True,
    foreseen: PipelineForecast | None = None,
) -> Run:
    """Make the run of a job that has a folder; see `ClusterFigures` for `before`."""
    folder, job = job.checkpointing.folder, evaluated_on(layout, job, config)
    assert folder is not None
    with computing_with(config.threads or 1), observed_run(job, config, observers) as observed:
        claimed = observed.claimed(job)
        observed.skips_report = not reports

        def play(emit: Callable[[Event], None], stop: StopRequest, timeline: Timeline) -> None:
            simulate_on(layout, claimed, emit, stop=stop, timeline=timeline)

        if compressor_of(job.strategy) is not None:
            with torch.random.fork_rng(devices=[]):
                made = [value for value in job.make_model().parameters() if value.requires_grad]
            shapes = [tuple(value.shape) for value in made]
            _report_whether_compression_pays(layout, job, shapes, made[0].dtype, observed)
        _played(layout, folder, observed, play, {"gradients": "real"}, before, foreseen)
    return observed.run()


def _dry_run(asked: _Arguments, foreseen: PipelineForecast | None) -> Run:
    config, steps = asked.config, asked.steps
    dry_run, images = assemble_dry_run(config, steps)
    if asked.check:
        dry_run = _in_equal_parts(dry_run)
    layout = laid_out(asked.where, dry_run)
    trial = Trial(layout=layout, dry_run=dry_run, faults=(), check=asked.check)
    folder = _folder(asked, dry_run.strategy.name)

    def play(emit: Callable[[Event], None], stop: StopRequest, timeline: Timeline) -> None:
        play_trial(trial, dry_run.seed, emit, stop=stop, timeline=timeline)

    known: dict[str, Any] = {"gradients": "none", "run": str(folder)}
    if asked.where.fitted:
        known["calibrated_within"] = calibrated_within(asked.where, dry_run)
    if steps is None and config.updates is None:
        config = config.model_copy(update={"epochs": dry_run.epochs})
    if steps is not None:
        known["epochs"] = round(steps * config.workers * config.worker_batch / images, 3)
    claim = create_folder_for(folder, config, "none")
    with computing_with(1), observed_run_in(folder, config, asked.observers, claim) as observed:
        _report_whether_compression_pays(layout, dry_run, dry_run.sizes.shapes, dry_run.sizes.dtype, observed)
        _played(layout, folder, observed, play, known, foreseen=foreseen)
    return observed.run()


_FEW_STEPS = 10
"""Steps of the dry runs that compare throughputs on nearly equal clusters."""
_FAR, _FELT = 100.0, 1e-3
"""Factor that stands for no limit of a fitted value, and by what share a value changes the throughput if it matters."""


def calibrated_within(where: Cluster, dry_run: DryRun) -> list[float] | None:
    """Return the 80 % interval of a dry run's images/s, relative to it, by those of the cluster's fitted values.

    Each value is set to its two ends in short dry runs. Their effects add up as those of independent values do, so
    the interval is too wide where fitted values compensate each other.

    Args:
        where: the cluster.
        dry_run: dry run.

    Returns:
        Lower and upper limit; None where a value that matters has no limit.
    """
    every = dry_run.strategy.traits(dry_run.workers).exchange_every
    short = replace(dry_run, steps=max(1, min(dry_run.steps, max(_FEW_STEPS, 2 * every))))

    def rate(cluster: Cluster) -> float:
        figures = RunFigures()
        simulate_dry_on(laid_out(cluster, short), short, figures.add)
        return figures.images_per_s

    where = where.model_copy(update={"faults": ()})
    base = rate(where)
    below = above = 0.0
    for name, ends in where.fitted.items():
        for end, factor in zip(ends, (1 / _FAR, _FAR), strict=True):
            change = rate(with_values(where, {name: value_of(where, name) * (end or factor)})) / base - 1
            if end is None and abs(change) > _FELT:
                return None
            below, above = below + min(0.0, change) ** 2, above + max(0.0, change) ** 2
    return [1 - min(1.0, below**0.5), 1 + above**0.5]


def _report_whether_compression_pays(
    layout: Layout,
    what: Job | DryRun,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    observed: ObservedRun,
) -> None:
    found = payoff_of(what.strategy, shapes, dtype, what.workers, layout.slowest_link_bytes_per_s)
    if found is not None:
        text = f"{found.text}; compressing is measured on this machine, and takes no simulated time"
        observed.on_event(Notice(time_s=0, text=text))


def _in_equal_parts(dry_run: DryRun) -> DryRun:
    """Return a dry run with gradients that add up to whole numbers, as invariants count them.

    Raises:
        RequestError: another balance was asked for.
    """
    if not dry_run.balance.optional:
        raise RequestError(
            f"invariants are checked on gradients of equal batches: leave --balance {dry_run.balance} out"
        )
    return replace(dry_run, balance=Off())


def laid_out(where: Cluster, what: Job | DryRun) -> Layout:
    """Assign every rank to a host.

    Raises:
        RequestError: the ranks do not fit, the speed of their accelerators is unknown, or the cluster's faults name
            ranks or hosts that do not exist.
    """
    strategy, traits = what.strategy, what.traits
    layout = lay_out(where, what.workers, traits.servers, traits.placement, draws=what.draws)
    hosts = {layout.host_of[rank] for rank in layout.roles.workers}
    if traits.one_host and len(hosts) > 1:
        raise RequestError(
            f"{strategy.name} needs memory that all workers share, and they are on {len(hosts)} hosts: take a cluster "
            "of one host, or take parameter_server or downpour"
        )
    kinds = [where.machines[host] for host in sorted(hosts)]
    unknown_speed = [kind for kind in kinds if kind.accelerators and "speed" not in kind.model_fields_set]
    if unknown_speed and any(not kind.accelerators for kind in kinds):
        raise RequestError(
            f"cluster {where.name}: the speed of {unknown_speed[0].name}'s accelerators is unknown, and other workers "
            "compute on cores: give that host speed, relative to a host of speed 1"
        )
    check_slowness(layout)
    for fault in where.faults:
        fault.check(layout)
    return layout


def _played(
    layout: Layout,
    folder: Path,
    observed: ObservedRun,
    play: Callable[[Callable[[Event], None], StopRequest, Timeline], None],
    known: dict[str, Any],
    before: tuple[float, float | None] = (0.0, 0.0),
    foreseen: PipelineForecast | None = None,
) -> None:
    """Run the simulation, and write the cluster and the timeline to the run folder."""
    stop, timeline = StopRequest(), Timeline(watched_ranks(layout))
    # The cluster is written first, so that a run that fails can be repeated from its folder.
    UNCLAIMED.write(folder / CLUSTER_FILE, cluster_text(layout.cluster))
    with asked_to_stop(stop.request):
        figures = ClusterFigures(layout, known, timeline, observed.on_event, before, foreseen)
        play(figures.on_event, stop, timeline)
    roles = layout.roles
    names = {rank: f"worker {index}" for index, rank in enumerate(roles.workers)}
    names |= {rank: f"server {index}" for index, rank in enumerate(roles.servers)}
    machines = layout.cluster.machines
    hosts = {rank: (host, f"host {host} ({machines[host].name})") for rank, host in enumerate(layout.host_of)}
    timeline.write(folder / TRACE_FILE, names, hosts)


WATCHED_WORKERS, WATCHED_SERVERS = 64, 16
"""Number of ranks with a timeline; with more it would be too long to view."""


class ClusterFigures:
    """Forwards events, and adds the cluster's figures to `RunEnded`.

    Args:
        layout: the cluster, and the host of every rank.
        known: figures known before the run; they take precedence.
        timeline: timeline of the run, which may be incomplete.
        emit: receiver of the events.
        before: seconds and price of the run that this one resumes.
        foreseen: forecast of the stages, if the network is cut into some.
    """

    def __init__(
        self,
        layout: Layout,
        known: dict[str, Any],
        timeline: Timeline,
        emit: Callable[[Event], None],
        before: tuple[float, float | None] = (0.0, 0.0),
        foreseen: PipelineForecast | None = None,
    ) -> None:
        self._layout = layout
        self._foreseen = foreseen
        self._before_s, self._price = before
        self._known = known
        self._timeline = timeline
        self._emit = emit
        self._waited_s = 0.0
        self._worked_s: dict[int, float] = {}

    def on_event(self, event: Event) -> None:
        """Process an event."""
        if isinstance(event, WorkerProgress):
            self._waited_s += event.wait_s
            self._worked_s[event.worker] = event.time_s
        if isinstance(event, RunEnded):
            self._warn_of_cut_timeline(event.time_s)
            stages = {} if self._foreseen is None else {"pipeline": self._foreseen.to_json()}
            event = replace(event, result={**event.result, **stages, **self._figures(event.result)})
        self._emit(event)
        if isinstance(event, RunStarted) and self._foreseen is not None:
            self._emit(Notice(time_s=event.time_s, text=self._foreseen.text))
        if isinstance(event, RunStarted) and self._timeline.ranks is not None:
            self._emit(Notice(time_s=event.time_s, text=_watched(self._layout, self._timeline.ranks)))

    def _warn_of_cut_timeline(self, time_s: float) -> None:
        if self._timeline.full_at_s is not None:
            text = f"trace.json holds the first {self._timeline.full_at_s:.3g} s only, which filled it"
            self._emit(Notice(time_s=time_s, text=text))

    def _figures(self, result: dict[str, Any]) -> dict[str, Any]:
        # The run's length for every worker: one that has done its share waits for the others.
        length_s = max(self._worked_s.values(), default=0.0)
        whole_s = length_s * len(self._worked_s)
        nothing_left_s = whole_s - sum(self._worked_s.values())
        hourly, price = self._layout.price_per_hour, self._price
        if hourly is not None and price is not None:
            price += (result["seconds"] - self._before_s) / 3600 * hourly
        return {
            "waiting_share": (self._waited_s + nothing_left_s) / whole_s if whole_s > 0 else 0.0,
            "nothing_left_share": nothing_left_s / whole_s if whole_s > 0 else 0.0,
            "cluster": self._layout.cluster.name,
            "hosts": len(self._layout.hosts_used),
            "price": None if hourly is None else price,
            "currency": self._layout.cluster.currency or None,
            **self._known,
        }


def watched_ranks(layout: Layout) -> frozenset[int] | None:
    """Return the ranks with a recorded timeline: the first of each role; None if that is all of them."""
    roles = layout.roles
    if len(roles.workers) <= WATCHED_WORKERS and len(roles.servers) <= WATCHED_SERVERS:
        return None
    return frozenset((*roles.workers[:WATCHED_WORKERS], *roles.servers[:WATCHED_SERVERS]))


def _watched(layout: Layout, ranks: frozenset[int]) -> str:
    roles = layout.roles
    parts = [("workers", roles.workers), ("servers", roles.servers)]
    counted = [
        f"{sum(rank in ranks for rank in members):,} of {len(members):,} {role}"
        for role, members in parts
        if members
    ]
    return f"trace.json shows the first {' and '.join(counted)}"


def try_strategy(
    recipe: str | Path | None = None,
    *,
    cluster: str | Path | Cluster,
    seeds: int,
    steps: int | None = None,
    step_time: str | StepTime | None = None,
    faults: str | Sequence[str | Fault] | None = None,
    on_failure: Callable[[Failure], bool] = lambda failure: True,
    **options: Unpack[RunOptions],
) -> Tried:
    """Make dry runs of a strategy with many seeds under faults, while its invariants are checked.

    Nothing is written. Each failure has the command that repeats it.

    Args:
        recipe: a YAML file of options.
        cluster: the name of a ready cluster, a cluster file, or a cluster.
        seeds: number of seeds to try, from `seed` on.
        steps: steps of every worker.
        step_time: compute time of a step instead of the cluster's.
        faults: faults of every seed, in addition to the cluster's own; None: some drawn from each seed.
        on_failure: callback with every failure; returns whether to continue.
        **options: see `simulate` with `gradients="none"`.

    Raises:
        RequestError: the request is invalid.
    """
    if seeds < 1:
        raise RequestError(f"seeds must be at least 1 (given {seeds})")
    refuse_real_only(options)
    check_dry_run_options(options, steps)
    config = configure(read_recipe(Path(recipe)) if recipe is not None else {}, options)
    where = described_cluster(cluster, step_time, ())
    dry_run = _in_equal_parts(assemble_dry_run(config, steps)[0])
    layout = laid_out(where, dry_run)
    given = None if faults is None else parse_faults(faults)
    for fault in given or ():
        fault.check(layout)
    facts: dict[str, Any] = {
        "cluster": where.name if isinstance(cluster, Cluster) else cluster,
        "steps": steps,
    }
    facts |= {"step_time": step_time, **options}

    words = ["simulate", *([] if recipe is None else [str(recipe)]), "--gradients", "none", "--check"]

    def command(seed: int, tried: str) -> str:
        return as_command(words, {**facts, "faults": tried or None, "seed": seed})

    trial = Trial(layout=layout, dry_run=dry_run, faults=given, command=command)
    with computing_with(1):
        return try_seeds(trial, range(config.seed, config.seed + seeds), on_failure=on_failure)
