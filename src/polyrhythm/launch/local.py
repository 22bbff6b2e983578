"""All ranks as child processes of this one."""

from __future__ import annotations

import signal
from collections.abc import Callable

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store
from polyrhythm.events import Event
from polyrhythm.launch.cores import available_cores, threads_for_worker
from polyrhythm.launch.ranks import Ranks
from polyrhythm.launch.signals import asked_to_stop, held_back
from polyrhythm.launch.watch import Watch
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopWish
from polyrhythm.strategies.cast import Cast


def run_local(
    job: Job,
    emit: Callable[[Event], None],
    *,
    port: int = 0,
    threads: int | None = None,
    start_method: str = "fork",
) -> None:
    """Runs a job on this host, one process a rank; returns when it is over.

    Args:
        job: what to train.
        emit: takes the run's events.
        port: of the store, on the loopback interface; 0 picks a free one.
        threads: compute threads of each worker; None shares the cores out.
        start_method: `fork` (quick, data shared; only from a process that has not computed on several threads)
            or `spawn`.

    Raises:
        RequestError: the port is in use, a rank found the request wrong, or the job cannot be sent to ranks.
        RunError: a rank failed or died, and the others could not go on.
    """
    servers = job.strategy.server_count
    cast = Cast(tuple(range(job.workers)), tuple(range(job.workers, job.workers + servers)))
    threads = threads or threads_for_worker(available_cores(), job.workers, job.strategy)
    ranks = Ranks(job, cast, threads, start_method)
    stop = StopWish()

    def ask() -> None:
        stop.wish()
        ranks.signal(signal.SIGTERM)

    try:
        with asked_to_stop(ask):
            with held_back():  # by the children, until they know what to do then
                for rank in range(cast.size):
                    ranks.start(Peer(rank, 0))
            if stop.wished:  # when there were only some of them
                ask()
            store = host_store(port)  # after the children were forked: they must not inherit its thread
            ranks.open_at(store.port)
            Watch(ranks, job, cast, stop, emit).run(store)
    finally:
        with held_back():  # somebody impatient may interrupt again
            ranks.end()
