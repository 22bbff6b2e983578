"""Real ranks on hosts that exist: a process each, in its host's namespace, with real links between them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch

from namespaces import Host
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.launch.process import ask_names_briefly

Role = Callable[[Communicator], Any]
_PORTS = count(29500)  # a new one each time: the last one's connections may still be closing
_PATIENCE_S = 90.0
_PRIORITY = os.sched_param(1)
"""Real-time, the lowest of them: a rank that wakes runs at once, whatever else the machine does. For ranks that mostly
sleep. All threads of a rank must have the same: a thread of gloo's that finds a lock taken looks again at once, and if
it goes before the one who has the lock, only the kernel's limit for real-time threads, once a second, ends that."""


class RanksFailed(Exception):
    """A rank died, or took too long."""


def on_hosts(
    hosts: Sequence[Host], role: Role, *, computes: bool = False, patience_s: float = _PATIENCE_S
) -> list[Any]:
    """Plays a role on real ranks.

    Args:
        hosts: of each rank; the first one keeps the store at which all meet.
        role: what a rank does with its communicator; gives something that can be pickled.
        computes: whether ranks compute; else they sleep most of the time, and go before all else on this machine.
        patience_s: for how long a rank is waited for.

    Returns:
        What each rank gave.

    Raises:
        RanksFailed: a rank died, or all together took too long.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in hosts]
    port = next(_PORTS)
    processes = [
        context.Process(target=_play, args=(hosts, rank, port, role, computes, pipes[rank][1]), daemon=True)
        for rank in range(len(hosts))
    ]
    try:
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        return [_result(rank, ours, patience_s) for rank, (ours, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(rank: int, pipe: Connection, patience_s: float) -> Any:
    if not pipe.poll(patience_s):
        raise RanksFailed(f"rank {rank} came to no end within {patience_s:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RanksFailed(f"rank {rank} died; its last words are above") from None


def _play(
    hosts: Sequence[Host], rank: int, port: int, role: Role, computes: bool, results: Connection
) -> None:
    hosts[rank].enter()
    if not computes:  # before there is any other thread, so that all have it
        os.sched_setscheduler(0, os.SCHED_RR, _PRIORITY)
    ask_names_briefly()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(len(hosts)), MASTER_ADDR=hosts[0].address, MASTER_PORT=str(port)
    )
    home, network = connect(from_environment())
    result = role(network)
    home.close()
    results.send(result)
    results.close()
