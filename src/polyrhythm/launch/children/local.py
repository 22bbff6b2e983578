"""All ranks as child processes of this one."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable

from polyrhythm.communication.secret import NONCE_BYTES
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, host_store
from polyrhythm.events import Event
from polyrhythm.launch.children.meeting_point import MeetingPoint
from polyrhythm.launch.children.ranks import Ranks
from polyrhythm.launch.children.watch import Watch
from polyrhythm.launch.cores import available_cores, threads_for_worker
from polyrhythm.launch.joining.entrance import Entrance
from polyrhythm.launch.preemption import Preemption
from polyrhythm.launch.signals import asked_to_stop, held_back
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.cast import cast_in_order


def run_local(
    job: Job,
    emit: Callable[[Event], None],
    *,
    port: int = 0,
    threads: int | None = None,
    start_method: str = "fork",
    entrance: Entrance | None = None,
) -> bool:
    """Runs a job on this host, one process a rank; returns when it is over.

    Args:
        job: what to train.
        emit: takes the run's events.
        port: of the store, on the loopback interface; 0 picks a free one.
        threads: compute threads of each worker; None shares the cores out.
        start_method: `fork` (quick, data shared; only from a process that has not computed on several threads)
            or `spawn`.
        entrance: lets others join; None: nobody can.

    Returns:
        Whether it was preempted.

    Raises:
        RequestError: the port is in use, a rank found the request wrong, or the job cannot be sent to ranks.
        RunError: a rank failed or died, and the others could not go on.
        Preempted: the notice ran out before everything was written.
    """
    cast = cast_in_order(job.workers, job.strategy.server_count)
    threads = threads or threads_for_worker(available_cores(), job.workers - job.losses.vacant, job.strategy)
    ranks = Ranks(job, cast, threads, start_method)
    stop, preemption = StopRequest(), Preemption(job.losses.notice_s)
    vacant = cast.workers[job.workers - job.losses.vacant :]

    def ask() -> None:
        stop.request()
        ranks.signal(signal.SIGTERM)
        if entrance is not None:
            entrance.ask_to_stop()

    try:
        with asked_to_stop(ask, preemption.begin):
            with held_back():  # by the children, until they know what to do then
                for rank in sorted(set(range(cast.size)) - set(vacant)):
                    ranks.start(Peer(rank, 0))
            if stop.requested:  # when there were only some of them
                ask()
            store = host_store(port)  # after the children were forked: they must not inherit its thread
            ranks.open_at(_meeting_point(store.port, entrance))
            watch = Watch(ranks, stop, emit, preemption)
            if entrance is not None:
                watch.open(entrance, store, [Peer(rank, 0) for rank in vacant])
            watch.run(store)
    finally:
        with held_back():  # somebody impatient may interrupt again
            ranks.end()
            if entrance is not None:
                entrance.close()
    return preemption.begun


def _meeting_point(port: int, entrance: Entrance | None) -> MeetingPoint:
    if entrance is None:
        return MeetingPoint(port, LOOPBACK, secrets.token_bytes(NONCE_BYTES))
    return MeetingPoint(port, entrance.address.host, entrance.link_key)
