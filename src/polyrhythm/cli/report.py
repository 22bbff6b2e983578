"""`polyrhythm report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyrhythm.cli.options import Json, names_in
from polyrhythm.cli.output import print_json, print_labeled
from polyrhythm.errors import RequestError


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Folders of runs, also of killed or running ones.")
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Cluster file of the runs' machines, as `profile` writes it: add a dry run to each report."
        ),
    ] = None,
    plots: Annotated[
        str,
        typer.Option(
            help=("Write every plot as an image file, too: png, svg, pdf, or several, separated by commas.")
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Write the reports of runs again from their events; of comparisons, their plots."""
    from polyrhythm.api.compare import PLAN_FILE, plots_of_comparison
    from polyrhythm.api.why import predict_run
    from polyrhythm.reporting.pages.plots import FOLDER, write_plots
    from polyrhythm.reporting.pages.report import plots_of, read_figures, write_report

    formats = names_in(plots)
    folders = [Path(run) for run in runs]
    for folder in folders:
        if not folder.is_dir():
            raise RequestError(f"{folder} is not the folder of a run")
    written, images = [], []
    for folder in folders:
        compares = (folder / PLAN_FILE).is_file()
        if compares and not formats:
            raise RequestError(f"{folder} is a comparison and has its report: --plots png writes its plots")
        if cluster is not None and not compares:
            predict_run(folder, cluster)
        try:
            if not compares:
                written.append(write_report(folder))
            if formats:
                drawn = plots_of_comparison(folder) if compares else plots_of(read_figures(folder), folder)
                images += write_plots(drawn, folder / FOLDER, formats)
        except OSError as error:
            raise RequestError(f"cannot write the report of {folder}: {error.strerror or error}") from None
    if json:
        files = {"reports": list(map(str, written))} | ({"plots": list(map(str, images))} if formats else {})
        print_json(files)
        return
    for path in written:
        print_labeled("report", f"{path}")
    for path in images:
        print_labeled("plot", f"{path}")
