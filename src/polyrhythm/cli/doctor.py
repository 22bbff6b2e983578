"""`polyrhythm doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_table

FAILS = 1


def doctor(
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Workers and servers that this host is to have.")
    ] = 2,
    out: Annotated[str, typer.Option(help="Folder for runs.")] = "runs",
    json: Json = False,
) -> None:
    """Check this machine and its network for problems; exits with 1 if a run would fail."""
    from polyrhythm.launch.doctor import examine

    found = examine(Path(out), workers)
    fails = any(each.state == "fails" for each in found)
    if json:
        print_json({"fails": fails, "checks": [asdict(each) for each in found]})
    else:
        rows = [[each.check, each.state, each.found, each.advice] for each in found]
        print_table("", ["check", "", "found", "what to do"], rows)
    if fails:
        raise typer.Exit(FAILS)
