"""Workers and servers of users' loops as threads of one process, over real links: a hundred runs a minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from polyrhythm.api.join import Group, LoopStage, reported_group
from polyrhythm.api.loop.random_state import GLOBAL_GENERATORS
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous, host_store
from polyrhythm.config.assemble import strategy_from
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment

Result = TypeVar("Result")
_ENDING_S = 20.0
"""For ranks to end once one has failed: a thread that is left in torch's code aborts Python at its exit."""


def _in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        with GLOBAL_GENERATORS:
            return function(*args, **options)

    return called


# torch waits for its generator's lock while it holds Python's, and takes Python's while it holds the generator's (where
# an allocation collects garbage): two threads that read or write its state at once can wait for each other for ever.
for _name in ("get_rng_state", "set_rng_state", "manual_seed"):
    for _module in (torch, torch.random):
        setattr(_module, _name, _in_turn(getattr(_module, _name)))


class Killed(BaseException):
    """Raised by a loop to end as a killed process does: without notice, as the launcher tells the others."""


def run_in_threads(
    spec: str,
    workers: int,
    loop: Callable[[Group], Result],
    report: Path | None = None,
    stage: Callable[[int], LoopStage] | None = None,
) -> list[Result]:
    """Run a loop on each of several workers, with the servers that the strategy needs.

    Args:
        spec: of the strategy.
        workers: how many.
        loop: called with each worker's group, outside of its `with`.
        report: a folder for the run's report.
        stage: returns that of a worker, of several strategies.

    Returns:
        What the loop returned on each worker; None of one that was killed.

    Raises:
        BaseException: what the first rank raised.
    """
    strategy = strategy_from(spec).in_own_loop()
    size = workers + strategy.traits(workers).servers
    roles = RoleAssignment(tuple(range(workers)), tuple(range(workers, size)))
    store = host_store()
    homes: dict[int, Rank] = {}
    killed: list[Peer] = []
    arriving = Lock()  # a rank that arrives late learns of earlier losses, as the store tells processes
    done: Queue[tuple[int, Any, BaseException | None]] = Queue()

    def collect(number: int) -> None:
        try:
            done.put((number, rank(number), None))
        except Killed:
            with arriving:
                killed.append(Peer(number, 0))
                there = list(homes.items())
            for other, home in there:
                if other == number:
                    _lose_all_others(number, home, size)
                else:
                    home.lose(Peer(number, 0))
            done.put((number, None, None))
        except BaseException as error:
            done.put((number, None, error))

    def rank(number: int) -> Any:
        torch.set_grad_enabled(True)
        own = dist.PrefixStore("test", dist.TCPStore(LOOPBACK, store.port, None, is_master=False))
        home, network = connect(Rendezvous(own, number, size, LOOPBACK), shared_memory=False)
        with arriving:
            homes[number] = home
            earlier = list(killed)
        for peer in earlier:
            home.lose(peer)
        world = World(network, roles, activity=home.activity, refused=home.refused)
        if world.is_worker:
            its = None if stage is None else stage(number)
            return loop(
                Group(strategy, world, home, stage=its)
                if report is None
                else reported_group(strategy, world, home, report, stage=its)
            )
        serve(strategy, world)
        home.close()
        return None

    threads = [Thread(target=collect, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    results: dict[int, Result] = {}
    for _ in threads:
        number, result, error = done.get()  # the limit on a test's time shows where all threads are
        if error is not None:
            _end_all(threads, homes)
            raise error
        if number < workers:
            results[number] = result
    with ThreadPoolExecutor(size) as pool:  # what a loop that ended with an error has left open
        list(pool.map(lambda number: homes[number].close(), range(workers)))
    for thread in threads:
        thread.join()
    return [results[number] for number in range(workers)]


def _end_all(threads: list[Thread], homes: dict[int, Rank]) -> None:
    """Tell each rank that all others are gone, as their processes would be, until none of them waits any more."""
    until = time.monotonic() + _ENDING_S
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        for number, home in list(homes.items()):
            _lose_all_others(number, home, len(threads))
        for thread in threads:
            thread.join(0.05)
    with ThreadPoolExecutor(len(threads)) as pool:
        list(pool.map(lambda home: home.close(), homes.values()))


def _lose_all_others(number: int, home: Rank, size: int) -> None:
    for other in range(size):
        if other != number:
            home.lose(Peer(other, 0))
