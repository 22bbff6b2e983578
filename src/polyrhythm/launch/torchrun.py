"""A rank that torchrun has started, on one host or several."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, from_environment
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.launch.cores import available_cores
from polyrhythm.launch.gathering import gather
from polyrhythm.launch.gpus import gpu_of
from polyrhythm.launch.name_service import ask_names_briefly
from polyrhythm.launch.patience import await_key
from polyrhythm.launch.preemption import Preemption
from polyrhythm.launch.rank import Circumstances, run_rank
from polyrhythm.launch.shared_notice import SharedNotice
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.launch.spokesman import leads as leads
from polyrhythm.launch.spokesman import started_by_torchrun as started_by_torchrun
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopWish
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


def cast_of(strategy: Strategy, rendezvous: Rendezvous) -> Cast:
    """Gives every rank its role, after all have said on which host they are."""
    store = rendezvous.store
    store.set(f"host/{rendezvous.rank}", os.environ.get("GROUP_RANK", "0"))
    hosts = [int(await_key(store, f"host/{rank}", f"rank {rank} to join")) for rank in range(rendezvous.size)]
    return cast_for(hosts, strategy.server_count, strategy.server_placement)


def run_under_torchrun(job: Job, emit: Callable[[Event], None], threads: int | None = None) -> bool:
    """Plays this process's role.

    Args:
        job: what to train.
        emit: takes the run's events; called on rank 0 only.
        threads: compute threads of each worker; None shares the host's cores out.

    Returns:
        Whether the run ended early because one of its hosts is taken away.
    """
    ask_names_briefly()
    rendezvous = gather(from_environment())
    cast = cast_of(job.strategy, rendezvous)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = threads or max(1, available_cores() // local_ranks)
    stop = StopWish()
    notice = SharedNotice(Preemption(job.losses.notice_s), rendezvous, emit)
    with asked_to_stop(stop.wish, notice.come):
        run_rank(job, cast, rendezvous, threads, Circumstances(stop, notice.emit))
    return notice.ended_the_run()


def device_of(device: torch.device) -> torch.device:
    """Gives this rank the GPU of its local rank, where replicas live on GPUs; ranks beyond the last share."""
    return gpu_of(device, int(os.environ.get("LOCAL_RANK", "0")))
