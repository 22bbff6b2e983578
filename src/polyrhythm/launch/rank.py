"""Work of one rank of a run, once it knows how to reach the others."""

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
from polyrhythm.launch.devices import use_gpu_of, use_threads
from polyrhythm.launch.process import keep_freed_memory
from polyrhythm.launch.watchdog import LOST_AFTER, Watchdog, WatchdogSetting
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import StopRequest, World
from polyrhythm.strategies.role_assignment import RoleAssignment


@dataclass(frozen=True)
class RankContext:
    """Connections of a rank to the process that started it.

    Attributes:
        stop: request to stop.
        emit: receiver of the run's events, on the leader; the watchdog's notices on every rank and thread.
        ledger: ledger of the run so far, for a replacement of the leader; times are those of `time.perf_counter`.
        guest: whether this process has joined a run of other hosts.
    """

    stop: StopRequest
    emit: Callable[[Event], None]
    ledger: Ledger | None = None
    guest: bool = False


def run_rank(
    job: Job, roles: RoleAssignment, rendezvous: Rendezvous, threads: int, around: RankContext
) -> None:
    """Play this rank's role until the run is over; a worker computes with `threads`, a server with one.

    Raises:
        RequestError: this process is a guest, and its host cannot reach a rank of the run.
    """
    emit = around.emit
    home, network = connect(rendezvous)
    if around.guest:  # before it takes part: synchronous workers would regroup with it again and again
        home.check_reachable()
    home.most_bytes = job.most_message_bytes
    home.patience_s = max(
        home.patience_s, LOST_AFTER * job.fault_tolerance.silence_s
    )  # the watchdog speaks first
    home.notify = lambda text: emit(Notice(time_s=home.clock.now(), text=text))
    arrivals = Arrivals()
    recorded = RecordingCommunicator(network, arrivals)
    world = World(
        recorded,
        roles,
        stop=around.stop,
        emit=emit,
        arrivals=arrivals,
        generation=rendezvous.generation,
        activity=home.activity,
        refused=home.refused,
        leader_returns=job.fault_tolerance.restarts > 0,
        ledger=_on_clock(around.ledger, home),
    )
    with Watchdog(_setting(job, roles, home, emit)):
        if world.is_worker:
            use_gpu_of(job.device)
            home.computes_on(job.device)
            use_threads(threads)
            keep_freed_memory()
            work(job, world)
        else:
            use_threads(1)
            serve(job.strategy, world, job.checkpointing.resume, draws=job.draws)
        home.close()


def _on_clock(ledger: Ledger | None, home: Rank) -> Ledger | None:
    if ledger is None or ledger.began_at_s is None:
        return ledger
    return replace(ledger, began_at_s=ledger.began_at_s + home.clock.now() - time.perf_counter())


def _setting(job: Job, roles: RoleAssignment, home: Rank, emit: Callable[[Event], None]) -> WatchdogSetting:
    names = {rank: f"worker {number}" for number, rank in enumerate(roles.workers)}
    names |= {rank: f"server {number}" for number, rank in enumerate(roles.servers)}
    folder = job.checkpointing.folder

    def what_then(rank: int) -> str:
        if job.faults.survives(rank, roles, leader_returns=job.fault_tolerance.restarts > 0):
            return "the run continues without it"
        return "the run stops; continue with --resume" + ("" if folder is None else f" {folder}")

    return WatchdogSetting(
        rendezvous=home.rendezvous,
        names=[names[rank] for rank in range(roles.size)],
        host=Introduction.own(home.rendezvous.address, shares=True).host,
        activity=home.activity,
        is_lost=home.is_lost,
        notify=lambda text: emit(Notice(time_s=home.clock.now(), text=text)),
        what_then=what_then,
        folder=folder,
        floor_s=job.fault_tolerance.silence_s,
    )
