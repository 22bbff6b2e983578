"""`polyrhythm join`."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

RUN_FAILED = 1


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT, as `polyrhythm train --listen` prints it.")],
    token_file: Annotated[
        str | None,
        typer.Option(help="The file of the run token (default: POLYRHYTHM_TOKEN in the environment)."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Folder or name of the run's data on this host (default: as in the run)."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto (default: as the run).")] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Compute threads (default: all cores).")
    ] = None,
) -> None:
    """Join a run that was started with --listen as one more worker, from this or another machine."""
    from polyrhythm.api.joining import complain, enter_run
    from polyrhythm.api.train import prepare_process
    from polyrhythm.errors import PolyrhythmError, RequestError

    prepare_process()
    if threads is not None and threads < 1:
        raise RequestError(f"threads must be at least 1 (given {threads})")
    guest = enter_run(address, token_file=token_file, data=data, device=device)
    print(f"joins as {guest.name}", file=sys.stderr, flush=True)
    try:
        status = guest.work(complain, threads)
    except PolyrhythmError as error:
        print(f"error: {error}", file=sys.stderr)
        status = RUN_FAILED
    except Exception:
        traceback.print_exc()
        status = RUN_FAILED
    print(guest.end_message if status == 0 else f"left with status {status}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # One that leaves in the middle still has links; their threads abort an interpreter that exits normally.
    os._exit(status)
