"""Workers and servers of users' loops as threads of one process, over real links: a hundred runs a minute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from polyrhythm.api.join import Group, reported_group
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous, host_store
from polyrhythm.config.assemble import strategy_from
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment

Result = TypeVar("Result")
_failed: list[dist.TCPStore] = []
"""Kept, since ranks that have failed go on looking at them."""


def run_in_threads(
    spec: str, workers: int, loop: Callable[[Group], Result], report: Path | None = None
) -> list[Result]:
    """Run a loop on each of several workers, with the servers that the strategy needs.

    Args:
        spec: of the strategy.
        workers: how many.
        loop: called with each worker's group, outside of its `with`.
        report: a folder for the run's report.

    Returns:
        What the loop returned on each worker.

    Raises:
        BaseException: what the first rank raised.
    """
    strategy = strategy_from(spec).in_own_loop()
    size = workers + strategy.traits(workers).servers
    roles = RoleAssignment(tuple(range(workers)), tuple(range(workers, size)))
    store = host_store()
    left: list[Callable[[], None]] = []
    done: Queue[tuple[int, Any, BaseException | None]] = Queue()

    def collect(number: int) -> None:
        try:
            done.put((number, rank(number), None))
        except BaseException as error:
            done.put((number, None, error))

    def rank(number: int) -> Any:
        torch.set_grad_enabled(True)
        own = dist.PrefixStore("test", dist.TCPStore(LOOPBACK, store.port, None, is_master=False))
        home, network = connect(Rendezvous(own, number, size, LOOPBACK), shared_memory=False)
        world = World(network, roles, activity=home.activity, refused=home.refused)
        if world.is_worker:
            left.append(home.close)
            return loop(
                Group(strategy, world, home)
                if report is None
                else reported_group(strategy, world, home, report)
            )
        serve(strategy, world)
        home.close()
        return None

    threads = [Thread(target=collect, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    results: dict[int, Result] = {}
    for _ in threads:
        number, result, error = done.get(timeout=60)
        if error is not None:
            _failed.append(store)
            raise error  # the others, which may wait for ever, end with the process
        if number < workers:
            results[number] = result
    with ThreadPoolExecutor(size) as pool:  # what a loop that ended with an error has left open
        list(pool.map(lambda close: close(), left))
    for thread in threads:
        thread.join()
    return [results[number] for number in range(workers)]
