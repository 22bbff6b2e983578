"""What one rank of a run does, once it knows how to reach the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.forwarding import RecordingCommunicator
from polyrhythm.communication.transports.shared_memory.meeting import Introduction
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.events import Event, Notice
from polyrhythm.launch.devices import use_threads
from polyrhythm.launch.process import keep_freed_memory
from polyrhythm.launch.watchdog import LOST_AFTER, Watchdog, WatchdogSetting
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import StopRequest, World
from polyrhythm.strategies.role_assignment import RoleAssignment


@dataclass(frozen=True)
class Circumstances:
    """How a rank is tied to the process that started it.

    Attributes:
        stop: whether someone wants to stop.
        emit: takes the run's events, on the leader; the watchdog's notices on every rank and thread.
        ledger: of the run so far, for a successor of the leader; times are those of `time.perf_counter`.
    """

    stop: StopRequest
    emit: Callable[[Event], None]
    ledger: Ledger | None = None


def run_rank(
    job: Job, cast: RoleAssignment, rendezvous: Rendezvous, threads: int, around: Circumstances
) -> None:
    """Play this rank's role until the run is over.

    Args:
        job: what to train.
        cast: who does what.
        rendezvous: how to reach the others.
        threads: compute threads of a worker; a server has one.
        around: who started it.
    """
    emit = around.emit
    home, network = connect(rendezvous)
    home.most_bytes = job.most_message_bytes
    home.patience_s = max(home.patience_s, LOST_AFTER * job.losses.silence_s)  # the watchdog speaks first
    home.tell = lambda text: emit(Notice(time_s=home.clock.now(), text=text))
    arrivals = Arrivals()
    recorded = RecordingCommunicator(network, arrivals)
    world = World(
        recorded,
        cast,
        stop=around.stop,
        emit=emit,
        arrivals=arrivals,
        incarnation=rendezvous.incarnation,
        activity=home.activity,
        refused=home.refused,
        leader_returns=job.losses.restarts > 0,
        ledger=_on_clock(around.ledger, home),
    )
    with Watchdog(_setting(job, cast, home, emit)):
        if world.is_worker:
            use_threads(threads)
            keep_freed_memory()
            work(job, world)
        else:
            use_threads(1)
            serve(job.strategy, world, job.keeping.resume)
        home.close()


def _on_clock(ledger: Ledger | None, home: Rank) -> Ledger | None:
    """Return a ledger with times of this rank's clock."""
    if ledger is None or ledger.began_at_s is None:
        return ledger
    return replace(ledger, began_at_s=ledger.began_at_s + home.clock.now() - time.perf_counter())


def _setting(job: Job, cast: RoleAssignment, home: Rank, emit: Callable[[Event], None]) -> WatchdogSetting:
    roles = {rank: f"worker {number}" for number, rank in enumerate(cast.workers)}
    roles |= {rank: f"server {number}" for number, rank in enumerate(cast.servers)}
    folder = job.keeping.folder

    def what_then(rank: int) -> str:
        if job.faults.survives(rank, cast, leader_returns=job.losses.restarts > 0):
            return "the run goes on without it"
        return "the run stops; continue with --resume" + ("" if folder is None else f" {folder}")

    return WatchdogSetting(
        rendezvous=home.rendezvous,
        roles=[roles[rank] for rank in range(cast.size)],
        host=Introduction.own(home.rendezvous.address, shares=True).host,
        activity=home.activity,
        is_lost=home.is_lost,
        say=lambda text: emit(Notice(time_s=home.clock.now(), text=text)),
        what_then=what_then,
        folder=folder,
        floor_s=job.losses.silence_s,
    )
