"""Run a whole job in virtual time: with real gradients, or as a dry run.

A dry run keeps strategies, messages and waiting, without a model or data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from polyrhythm.events import Event
from polyrhythm.roles.dry_run import DryRun, as_it_was_sent
from polyrhythm.roles.dry_run_worker import work_dry
from polyrhythm.roles.job import Job
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import StopRequest, World
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.scene import Scene
from polyrhythm.simulation.stage import Piece, Surroundings, modelled_stage, plain_stage
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.strategies.role_assignment import cast_in_order
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import time_shares

__all__ = ["Surroundings", "simulate", "simulate_on"]


def simulate(job: Job, surroundings: Surroundings | None = None) -> list[Event]:
    """Train with real gradients in virtual time, on a cluster of constant links.

    Args:
        job: what to train; its run folder, if it has one, must exist.
        surroundings: the cluster.

    Returns:
        The run's events, in order, with virtual seconds.

    Raises:
        Deadlock: no rank can go on.
    """
    events: list[Event] = []
    cast = cast_in_order(job.workers, job.traits.servers)
    plain_stage(cast, _piece(job), events.append, surroundings or Surroundings()).play()
    return events


def simulate_on(
    layout: Layout,
    job: Job,
    emit: Callable[[Event], None],
    *,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Train with real gradients in virtual time on a modelled cluster.

    Args:
        layout: the cluster, and which rank is on which of its hosts.
        job: what to train; its run folder, if it has one, must exist.
        emit: takes the run's events, in order, with virtual seconds.
        stop: whether the run is asked to stop.
        timeline: records what ranks do; None: nothing is recorded.

    Raises:
        RequestError: the cluster slows a rank that is no worker.
        Deadlock: no rank can go on.
    """
    seed = job.learning.seed
    stage = modelled_stage(layout, _piece(job), emit, seed=seed, stop=stop, timeline=timeline)
    Scene(stage, job.strategy, layout.cluster.faults, seed=seed, host_of=layout.host_of).play()


def _piece(job: Job) -> Piece:
    timed = replace(job, time_shares=_SharesOnce(job.dataset.image_shape))
    return Piece(partial(run_rank, timed))


def run_rank(job: Job, world: World) -> None:
    """Run one rank of a job, worker or server."""
    if world.is_worker:
        work(job, world)
    else:
        serve(job.strategy, world, job.keeping.resume)


class _SharesOnce:
    """The time shares of the first replica, which are those of all others."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        self._image_shape = image_shape
        self._shares: tuple[float, ...] | None = None

    def __call__(self, model: nn.Module, flat: FlatParameters) -> tuple[float, ...]:
        if self._shares is None:
            self._shares = time_shares(model, flat, self._image_shape)
        return self._shares


def dry_events(dry_run: DryRun, surroundings: Surroundings | None = None) -> list[Event]:
    """Run a dry run on a cluster of constant links.

    Returns:
        The run's events, in order, with virtual seconds.

    Raises:
        Deadlock: no rank can go on.
    """
    events: list[Event] = []
    cast = cast_in_order(dry_run.workers, dry_run.traits.servers)
    plain_stage(cast, piece_of(dry_run), events.append, surroundings or Surroundings()).play()
    return events


def simulate_dry_on(
    layout: Layout,
    dry_run: DryRun,
    emit: Callable[[Event], None],
    *,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Run a dry run on a modelled cluster, with its faults.

    Args:
        layout: the cluster, and which rank is on which of its hosts.
        dry_run: the dry run.
        emit: takes the run's events, in order, with virtual seconds.
        stop: whether the run is asked to stop.
        timeline: records what ranks do; None: nothing is recorded.

    Raises:
        RequestError: the cluster slows a rank that is no worker.
        Deadlock: no rank can go on.
    """
    seed, faults = dry_run.seed, layout.cluster.faults
    piece = piece_of(dry_run, faultless=not faults)
    stage = modelled_stage(layout, piece, emit, seed=seed, stop=stop, timeline=timeline)
    Scene(stage, dry_run.strategy, faults, seed=seed, host_of=layout.host_of).play()


def piece_of(dry_run: DryRun, *, faultless: bool = True) -> Piece:
    """Return what a dry run's ranks do; messages count as many bytes as the model's.

    Args:
        dry_run: the dry run.
        faultless: whether nothing changes messages on their way.
    """
    # No `partial`: a call through C deepens the stack that is put aside whenever a rank waits.
    if not (faultless and dry_run.computes_nothing):
        return Piece(lambda world: perform(dry_run, world), dry_run.stand_in.nbytes)
    still = replace(dry_run, still=True)
    return Piece(lambda world: perform(still, world), still.stand_in.nbytes, as_it_was_sent)


def perform(dry_run: DryRun, world: World) -> None:
    """Run one rank of a dry run, worker or server."""
    if world.is_worker:
        work_dry(dry_run, world)
    else:
        serve(dry_run.strategy, world, finite=dry_run.still)
