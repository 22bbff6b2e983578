"""A rank that torchrun has started, on one host or several."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from polyrhythm.communication.transports.torch_distributed.link_words import newest_incarnations
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, from_environment
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.launch.gpus import gpu_of
from polyrhythm.launch.joining.admission import Admission
from polyrhythm.launch.name_service import ask_names_briefly
from polyrhythm.launch.parentage import first_parent, leave_with
from polyrhythm.launch.patience import LIMIT_S, Patience
from polyrhythm.launch.preemption import Preemption
from polyrhythm.launch.rank import Circumstances, run_rank
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.launch.torchrun.gathering import Gathered, RunIsOver, gather, starts_hosts_apart
from polyrhythm.launch.torchrun.neighbours import threads_beside
from polyrhythm.launch.torchrun.nothing_left import tell_that_it_is_over
from polyrhythm.launch.torchrun.receiving import Late, receiving
from polyrhythm.launch.torchrun.replaced import leave_with_start
from polyrhythm.launch.torchrun.shared_notice import SharedNotice
from polyrhythm.launch.torchrun.spokesman import leads as leads
from polyrhythm.launch.torchrun.spokesman import started_by_torchrun as started_by_torchrun
from polyrhythm.launch.torchrun.wholeness import StartIsVoid, check_counts, make_whole
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.cast import Cast, cast_for
from polyrhythm.strategies.strategy import Strategy


def workers_of(strategy: Strategy) -> int:
    """Counts the workers: all processes that are not needed as servers.

    Raises:
        RequestError: there are too few processes.
    """
    size = int(os.environ["WORLD_SIZE"])
    workers = size - strategy.server_count
    if workers < 1:
        raise RequestError(
            f"{strategy} needs {strategy.server_count} servers and a worker, torchrun started {size} processes: "
            f"start at least {strategy.server_count + 1}"
        )
    return workers


def cast_of(
    strategy: Strategy, rendezvous: Rendezvous, vacant: int = 0, patience: Patience | None = None
) -> Cast:
    """Gives every rank its role, after all have said on which host they are.

    Args:
        strategy: knows how many servers there must be, and where.
        rendezvous: of the ranks that torchrun has started.
        vacant: places of workers that nobody has yet; their ranks come after torchrun's.
        patience: with the others; None: that of ranks that are not told otherwise.
    """
    store, size = rendezvous.store, rendezvous.size
    store.set(f"host/{rendezvous.rank}", os.environ.get("GROUP_RANK", "0"))
    patience = patience or Patience()
    hosts = list(map(int, patience.keys(store, lambda rank: f"host/{rank}", range(size))))
    cast = cast_for(hosts, strategy.server_count, strategy.server_placement)
    return replace(cast, workers=(*cast.workers, *range(size, size + vacant)))


def run_under_torchrun(
    job: Job,
    emit: Callable[[Event], None],
    threads: int | None = None,
    admission: Admission | None = None,
    gather_s: float = LIMIT_S,
) -> bool:
    """Plays this process's role.

    Args:
        job: what to train.
        emit: takes the run's events, one at a time; called on rank 0 only, but for notices.
        threads: compute threads of each worker; None shares the host's cores out.
        admission: how others join; None: nobody can.
        gather_s: seconds for which ranks wait for each other at the start.

    Returns:
        Whether the run ended early because one of its hosts is taken away.

    Raises:
        RequestError: this rank has another run token than rank 0, or none.
        RunError: the run failed, or some ranks never came.
    """
    ask_names_briefly()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # else whoever starts this may well leave it behind on purpose
        leave_with(first_parent())
    outside = from_environment()
    try:
        start, cast, shared = _met(outside, job, Patience(gather_s))
    except RunIsOver:
        return False
    if outside.rank and starts_hosts_apart(outside):
        leave_with_start(outside, start)
    start = _among(start, cast, admission)
    if start.rendezvous.incarnation:  # the others give it what it needs
        job = replace(job, keeping=replace(job.keeping, resume=False))
    stop = StopRequest()
    notice = SharedNotice(Preemption(job.losses.notice_s), start.rendezvous, emit)

    entrance = None if admission is None else admission.entrance

    def ask() -> None:
        stop.request()
        if entrance is not None:
            entrance.ask_to_stop()

    with (
        asked_to_stop(ask, notice.come),
        receiving(outside, start, cast, notice.emit, Late(entrance, job.losses.silence_s)) as on_event,
    ):
        run_rank(job, cast, start.rendezvous, threads or shared, Circumstances(stop, on_event))
    return notice.ended_the_run()


def take_leave(gather_s: float) -> None:
    """Lets all other ranks leave, in rank 0, where a run has nothing left to do.

    Args:
        gather_s: seconds for which it waits for them.

    Raises:
        RunError: some ranks never came.
    """
    ask_names_briefly()
    tell_that_it_is_over(from_environment(), Patience(gather_s))


def _met(outside: Rendezvous, job: Job, patience: Patience) -> tuple[Gathered, Cast, int]:
    """Gives the start that this process is of, who does what, and a worker's compute threads.

    Raises:
        RunError: some ranks have not come in time, or the store is gone.
        RunIsOver: the others have ended.
    """
    while True:
        start = gather(outside, patience)
        looking = patience.looking(partial(check_counts, outside, start))
        try:
            cast = cast_of(job.strategy, start.rendezvous, job.losses.vacant, looking)
            shared = threads_beside(start.rendezvous, range(outside.size), cast, job.strategy, looking)
            make_whole(start, looking)
        except StartIsVoid:
            continue
        return start, cast, shared


def _among(start: Gathered, cast: Cast, admission: Admission | None) -> Gathered:
    """Gives a start as a rank finds it that knows the whole cast, and who was there before."""
    found = replace(start.rendezvous, size=cast.size)
    if found.incarnation:
        found = replace(found, met=newest_incarnations(found.store, cast.size))
    return replace(start, rendezvous=found if admission is None else admission.of(found))


def device_of(device: torch.device) -> torch.device:
    """Gives this rank the GPU of its local rank, where replicas live on GPUs; ranks beyond the last share."""
    return gpu_of(device, int(os.environ.get("LOCAL_RANK", "0")))
