"""Rehearses a whole run in virtual time: strategies, messages and waiting, without a model or data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polyrhythm.events import Event
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.rehearsing.rehearser import rehearse
from polyrhythm.roles.rehearsing.stand_in import as_it_was_sent
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import StopRequest, World
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.scene import Scene
from polyrhythm.simulation.stage import Piece, Surroundings, modelled_stage, plain_stage
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.strategies.cast import cast_in_order


def rehearsed(rehearsal: Rehearsal, surroundings: Surroundings | None = None) -> list[Event]:
    """Rehearses on a cluster of constant links.

    Returns:
        The run's events, in order, with virtual seconds.

    Raises:
        Deadlock: no rank can go on.
    """
    events: list[Event] = []
    cast = cast_in_order(rehearsal.workers, rehearsal.strategy.server_count)
    plain_stage(cast, piece_of(rehearsal), events.append, surroundings or Surroundings()).play()
    return events


def rehearse_on(
    layout: Layout,
    rehearsal: Rehearsal,
    emit: Callable[[Event], None],
    *,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Rehearses on a modelled cluster, with its faults.

    Args:
        layout: the cluster, and which rank is on which of its hosts.
        rehearsal: what is rehearsed.
        emit: takes the run's events, in order, with virtual seconds.
        stop: whether someone wants the run to stop.
        timeline: notes what ranks do, if it is wanted.

    Raises:
        RequestError: the cluster slows a rank that is no worker.
        Deadlock: no rank can go on.
    """
    seed, faults = rehearsal.seed, layout.cluster.faults
    piece = piece_of(rehearsal, faultless=not faults)
    stage = modelled_stage(layout, piece, emit, seed=seed, stop=stop, timeline=timeline)
    Scene(stage, rehearsal.strategy, faults, seed=seed, host_of=layout.host_of).play()


def piece_of(rehearsal: Rehearsal, *, faultless: bool = True) -> Piece:
    """Gives what a stage plays; its messages are as large as the model's.

    Args:
        rehearsal: what is rehearsed.
        faultless: whether nothing changes messages on their way.
    """
    # No `partial`: a call through C deepens the stack that is put aside whenever a rank waits.
    if not (faultless and rehearsal.computes_nothing):
        return Piece(lambda world: perform(rehearsal, world), rehearsal.stand_in.nbytes)
    still = replace(rehearsal, still=True)
    return Piece(lambda world: perform(still, world), still.stand_in.nbytes, as_it_was_sent)


def perform(rehearsal: Rehearsal, world: World) -> None:
    """Plays a rank's part, worker or server."""
    if world.is_worker:
        rehearse(rehearsal, world)
    else:
        serve(rehearsal.strategy, world, finite=rehearsal.still)
