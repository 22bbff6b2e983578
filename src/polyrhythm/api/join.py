"""Joining a run from a script with a training loop of its own."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from polyrhythm.api.loop.group import Group
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.communication.transports.torch_distributed.transport import connect
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.launch.cores import use_threads
from polyrhythm.launch.kept_memory import keep_freed_memory
from polyrhythm.launch.name_service import ask_names_briefly
from polyrhythm.launch.script.meeting import leader_returns, meet, started_by_run
from polyrhythm.launch.torchrun.neighbours import threads_beside
from polyrhythm.launch.torchrun.started_rank import started_by_torchrun
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.optimizing.quick_optimizers import make_optimizers_quickly


def join(strategy: str | Strategy = "synchronous", *, threads: int | None = None) -> Group:
    """Joins the run that this process has been started for.

        with polyrhythm.join("parameter_server(servers=2)") as group:
            model, optimizer = group.distribute(model, optimizer)
            for x, y in group.shard(loader):
                criterion(model(x), y).backward()
                optimizer.step(); optimizer.zero_grad()

    Started by `polyrhythm run --workers 2 script.py`, by `torchrun --nproc-per-node 4 script.py` (two of the four then
    serve), or by `python script.py`, which is a run of one worker. In a process that is a server this call serves
    until all workers have left, and then ends the process.

    Args:
        strategy: a spec, or a strategy; the same in all processes.
        threads: compute threads of this worker; None shares a host's cores out, and leaves a worker alone as it is.

    Returns:
        This worker's group, to be used in a `with`.

    Raises:
        RequestError: no such strategy, too few processes for it, or another one than rank 0's.
        RunError: the others cannot be reached.
    """
    if threads is not None and threads < 1:
        raise RequestError(f"threads must be at least 1 (given {threads})")
    chosen = strategy if isinstance(strategy, Strategy) else strategy_from(strategy)
    ask_names_briefly()
    rendezvous, cast = meet(chosen)
    if started_by_torchrun() and not started_by_run():
        # torchrun leaves every rank one thread; `polyrhythm run` has shared the cores out already.
        shared = threads_beside(rendezvous, range(rendezvous.size), cast, chosen)
        threads = threads or shared
    home, network = connect(rendezvous)
    world = World(
        network,
        cast,
        incarnation=rendezvous.incarnation,
        activity=home.activity,
        refused=home.refused,
        leader_returns=leader_returns(),
    )
    if not world.is_worker:
        _serve(chosen, world, home)
    if threads is not None:
        use_threads(threads)
    keep_freed_memory()
    return Group(chosen, world, home)


def _serve(strategy: Strategy, world: World, home: Rank) -> NoReturn:
    """Serves, and ends the process: a `with` cannot skip its body, and the rest of the script is not for a server."""
    status = 0
    try:
        use_threads(1)
        make_optimizers_quickly()  # nothing of the user's runs here that could be compiled
        serve(strategy, world)
        home.close()
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # SystemExit would run the script's own `except` and `finally` blocks, which would speak of a training that this
    # process has not done.
    os._exit(status)
