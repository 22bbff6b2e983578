"""`polyrhythm report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json
from polyrhythm.errors import RequestError


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Folders of runs, also of killed or running ones.")
    ],
    json: Json = False,
) -> None:
    """Write the report of each run from its events, as far as it came."""
    from polyrhythm.reporting.pages.report import write_report

    for run in runs:
        if not Path(run).is_dir():
            raise RequestError(f"{run} is not the folder of a run")
    written = []
    for run in runs:
        try:
            written.append(write_report(Path(run)))
        except OSError as error:
            raise RequestError(f"cannot write the report of {run}: {error.strerror or error}") from None
    if json:
        print_json({"reports": [str(path) for path in written]})
    else:
        for path in written:
            print(f"report      {path}")
