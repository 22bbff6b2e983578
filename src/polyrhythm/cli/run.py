"""`polyrhythm run`."""

from __future__ import annotations

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
            help="How many times a rank that was killed, and can be done without, is started again.",
        ),
    ] = 3,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
) -> None:
    """Run a script with your own training loop on several workers of this machine."""
    from polyrhythm.launch.script import run_script

    run_script(script, arguments or [], workers=workers, threads=threads, restarts=restarts, module=module)
