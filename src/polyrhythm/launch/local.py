"""All ranks as child processes of this one."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, from_json
from polyrhythm.launch.child import BUG, PEER, REQUEST, RUN, child_main
from polyrhythm.launch.cores import available_cores, threads_for_worker
from polyrhythm.launch.signals import asked_to_stop, held_back
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopWish
from polyrhythm.strategies.cast import Cast

_GRACE_S = 2.0
"""How long the others may take to say what they saw, once a rank has failed."""


@dataclass
class _Child:
    """A rank's process, and what it last said."""

    rank: int
    process: BaseProcess
    pipe: Connection
    open: bool = True
    error: str = ""
    kind: str = ""
    failed: bool = field(default=False)


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
        RunError: a rank failed or died.
    """
    servers = job.strategy.server_count
    cast = Cast(tuple(range(job.workers)), tuple(range(job.workers, job.workers + servers)))
    threads = threads or threads_for_worker(available_cores(), job.workers, job.strategy)
    children: list[_Child] = []
    stop = StopWish()

    def ask() -> None:
        stop.wish()
        _signal(children, signal.SIGTERM)

    try:
        with asked_to_stop(ask):
            with held_back():  # by the children, until they know what to do then
                _start(children, job, cast, threads, start_method)
            if stop.wished:  # when there were only some of them
                ask()
            store = host_store(port)  # after the children were forked: they must not inherit its thread
            for child in children:
                with suppress(BrokenPipeError):  # it has died already, as will be seen
                    child.pipe.send_bytes(str(store.port).encode())
            _watch(children, cast, job, emit)
    finally:
        with held_back():  # somebody impatient may interrupt again
            _signal(children, signal.SIGKILL)
            for child in children:
                child.process.join()


def _start(children: list[_Child], job: Job, cast: Cast, threads: int, start_method: str) -> None:
    context = multiprocessing.get_context(start_method)
    for rank in range(cast.size):
        ours, theirs = context.Pipe()
        process = context.Process(  # type: ignore[attr-defined]
            target=child_main,
            args=(job, cast, rank, threads, theirs),
            name=f"polyrhythm rank {rank}",
            daemon=True,
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # spawn sends the job to the child
            raise RequestError(
                f"workers cannot be given the data or the model ({error}): define classes and functions at the top "
                "of a module, not inside functions"
            ) from None
        theirs.close()
        children.append(_Child(rank, process, ours))


def _watch(children: list[_Child], cast: Cast, job: Job, emit: Callable[[Event], None]) -> None:
    """Passes events on until all children have left; raises if one did not leave well."""
    give_up_at: float | None = None
    while any(child.open for child in children):
        patience = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
        ready = wait([child.pipe for child in children if child.open], patience)
        if not ready and patience is not None:
            break
        for child in children:
            if child.pipe in ready:
                _hear(child, emit)
        if give_up_at is None and any(child.failed for child in children):
            give_up_at = time.monotonic() + _GRACE_S
    if any(child.failed for child in children):
        raise _verdict(children, cast, job)


def _hear(child: _Child, emit: Callable[[Event], None]) -> None:
    try:
        record = json.loads(child.pipe.recv_bytes())
    except (EOFError, OSError):  # the child has left
        child.process.join()
        child.open = False
        child.failed |= child.process.exitcode != 0
        return
    if "event" in record:
        emit(from_json(record["event"]))
    else:
        child.error, child.kind, child.failed = record["error"], record["kind"], True


def _verdict(children: list[_Child], cast: Cast, job: Job) -> Exception:
    """Chooses the failure that explains the others: a lost peer is only an echo of one."""
    folder = f" {job.keeping.folder}" if job.keeping.folder is not None else ""
    failed = [child for child in children if child.failed]
    for child in failed:
        if child.kind == REQUEST:
            return RequestError(child.error)
    for child in failed:  # one that was killed could not say so, and the others' collectives broke
        status = child.process.exitcode
        if not child.kind and status is not None:
            how = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"left with status {status}"
            )
            return RunError(f"{_name(child.rank, cast)} {how}; continue with --resume{folder}")
    for child in failed:
        if child.kind in (RUN, BUG):
            return RunError(f"{_name(child.rank, cast)}: {child.error}")
    assert failed[0].kind == PEER
    return RunError(f"{_name(failed[0].rank, cast)}: {failed[0].error}")


def _name(rank: int, cast: Cast) -> str:
    if rank in cast.workers:
        return f"worker {cast.workers.index(rank)} (rank {rank})"
    return f"server {cast.servers.index(rank)} (rank {rank})"


def _signal(children: list[_Child], number: signal.Signals) -> None:
    for child in children:
        if child.process.pid is not None and child.process.is_alive():
            os.kill(child.process.pid, number)
