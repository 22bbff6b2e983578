"""`polyrhythm run`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def run(
    script: Annotated[
        str, typer.Argument(help="A Python script that calls polyrhythm.join; with -m the name of a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Number of workers; servers are added.")] = 2,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Compute threads of a worker (default: its share of the cores)."),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Restarts, within an hour, of each killed rank that the run can do without.",
        ),
    ] = 3,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
) -> None:
    """Run a script with your own training loop on several workers of this machine."""
    from contextlib import closing, nullcontext

    from polyrhythm.launch.rank_server import RankServer, threads_of_ranks

    forks = sys.platform == "linux" and (module or script.endswith(".py"))
    if forks:  # libraries that ranks inherit read it when they are loaded
        os.environ["OMP_NUM_THREADS"] = threads_of_ranks(workers, threads)
    from polyrhythm.launch.script import run_script

    ours = RankServer(None, "polyrhythm.api.join", forks=True) if forks else None
    with nullcontext() if ours is None else closing(ours) as server:
        run_script(
            script,
            arguments or [],
            workers=workers,
            threads=threads,
            restarts=restarts,
            module=module,
            server=server,
        )
