"""Run a whole job in virtual time: with real gradients, or as a dry run.

A dry run keeps strategies, messages and waiting, without a model or data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from polyrhythm.events import Event
from polyrhythm.roles.dry_run import DryRun, as_it_was_sent, work_dry
from polyrhythm.roles.job import Job
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import StopRequest, World
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.simulated_run import ConstantCluster, RankProgram, constant_run, modeled_run
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import time_shares

__all__ = ["ConstantCluster", "simulate", "simulate_on"]


def simulate(job: Job, cluster: ConstantCluster | None = None) -> list[Event]:
    """Train with real gradients in virtual time, on a cluster of constant links.

    Args:
        job: training job; its run folder, if it has one, must exist.
        cluster: the links and compute times.

    Returns:
        The run's events, in order, with virtual seconds.

    Raises:
        Deadlock: no rank can continue.
    """
    events: list[Event] = []
    roles = roles_in_order(job.workers, job.traits.servers)
    constant_run(roles, job_program(job), events.append, cluster or ConstantCluster()).play()
    return events


def simulate_on(
    layout: Layout,
    job: Job,
    emit: Callable[[Event], None],
    *,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Train with real gradients in virtual time on a modeled cluster.

    Args:
        layout: the cluster, and which rank is on which of its hosts.
        job: training job; its run folder, if it has one, must exist.
        emit: receiver of the run's events, in order, with virtual seconds.
        stop: whether the run is asked to stop.
        timeline: records what ranks do; None: nothing is recorded.

    Raises:
        RequestError: the cluster slows a rank that is no worker.
        Deadlock: no rank can continue.
    """
    seed = job.learning.seed
    run = modeled_run(layout, job_program(job), emit, seed=seed, stop=stop, timeline=timeline)
    FaultInjector(run, job.strategy, layout.cluster.faults, seed=seed, host_of=layout.host_of).play()


def job_program(job: Job) -> RankProgram:
    """Return the program of the ranks of a job."""
    timed = replace(job, time_shares=_shares_once(job.dataset.image_shape))
    return RankProgram(partial(run_rank, timed))


def run_rank(job: Job, world: World) -> None:
    """Run one rank of a job, worker or server."""
    if world.is_worker:
        work(job, world)
    else:
        serve(job.strategy, world, job.checkpointing.resume, draws=job.draws)


def _shares_once(
    image_shape: tuple[int, int, int],
) -> Callable[[nn.Module, FlatParameters], tuple[float, ...]]:
    """Return a function that measures the time shares of the first replica, and returns them for all others."""
    found: list[tuple[float, ...]] = []

    def shares(model: nn.Module, flat: FlatParameters) -> tuple[float, ...]:
        if not found:
            found.append(time_shares(model, flat, image_shape))
        return found[0]

    return shares


def dry_events(dry_run: DryRun, cluster: ConstantCluster | None = None) -> list[Event]:
    """Run a dry run on a cluster of constant links.

    Returns:
        The run's events, in order, with virtual seconds.

    Raises:
        Deadlock: no rank can continue.
    """
    events: list[Event] = []
    roles = roles_in_order(dry_run.workers, dry_run.traits.servers)
    constant_run(roles, program_of(dry_run), events.append, cluster or ConstantCluster()).play()
    return events


def simulate_dry_on(
    layout: Layout,
    dry_run: DryRun,
    emit: Callable[[Event], None],
    *,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Run a dry run on a modeled cluster, with its faults; arguments and errors are those of `simulate_on`."""
    seed, faults = dry_run.seed, layout.cluster.faults
    program = program_of(dry_run, faultless=not faults)
    run = modeled_run(layout, program, emit, seed=seed, stop=stop, timeline=timeline)
    FaultInjector(run, dry_run.strategy, faults, seed=seed, host_of=layout.host_of).play()


def program_of(dry_run: DryRun, *, faultless: bool = True) -> RankProgram:
    """Return the program of a dry run's ranks; messages have the sizes of the model's.

    Args:
        dry_run: the dry run.
        faultless: whether nothing changes messages on their way.
    """
    # No `partial`: a call through C deepens the stack that is put aside whenever a rank waits.
    if not (faultless and dry_run.computes_nothing):
        return RankProgram(lambda world: perform(dry_run, world), dry_run.stand_in.nbytes)
    still = replace(dry_run, still=True)
    return RankProgram(lambda world: perform(still, world), still.stand_in.nbytes, as_it_was_sent)


def perform(dry_run: DryRun, world: World) -> None:
    """Run one rank of a dry run, worker or server."""
    if world.is_worker:
        work_dry(dry_run, world)
    else:
        serve(dry_run.strategy, world, finite=dry_run.still, draws=dry_run.draws)
