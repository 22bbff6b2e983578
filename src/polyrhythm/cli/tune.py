"""`polyrhythm tune`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json, with_run_options
from polyrhythm.cli.output import (
    print_command,
    print_json,
    print_labeled,
    print_progress,
    print_table,
    wrapped,
)
from polyrhythm.errors import RequestError
from polyrhythm.escaping import shell
from polyrhythm.user_files import parse_yaml, read_text

INTERRUPTED = 130
ROWS = 10


@partial(with_run_options, left_out=("seed",))
def tune(
    space: Annotated[
        str | None, typer.Argument(metavar="SPACE", help="A YAML file: options and the values they may take.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A YAML file of options that all runs have.")] = None,
    method: Annotated[
        str, typer.Option(help="Method: grid, random, tpe, hyperband, evolution, pbt or darts.")
    ] = "tpe",
    budget: Annotated[
        str, typer.Option(help="Budget: 60 trials, 2h (virtual time of simulated runs) or 20USD.")
    ] = "20 trials",
    goal: Annotated[
        str,
        typer.Option(help="Objective: top1, top5 or loss of the last test; seconds or price to --until."),
    ] = "top1",
    prune: Annotated[
        str, typer.Option(help="Early stopping of trials: none, median, halving or curve (extrapolation).")
    ] = "none",
    population: Annotated[
        int | None,
        typer.Option(metavar="N", help="Population size of evolution (default 10) and pbt (default 8)."),
    ] = None,
    interval: Annotated[int, typer.Option(metavar="N", help="Epochs between exchanges of pbt.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of the search and of its runs.")] = 0,
    cluster: Annotated[
        str | None, typer.Option(help="Simulate on a cluster file or a ready cluster (default: real runs).")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Parallel runs (default: one per core if simulated, else one)."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="A database for the study, as Optuna takes it (default: SQLite in the folder)."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="The folder: new, empty, or of the same search (default: a new one in runs/)."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Folder of a search to continue; several processes may share it.")
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Search for the best hyperparameters in many runs; writes a report and a recipe."""
    from polyrhythm.api import tune as tuning

    if (space is None) == (resume is None):
        raise RequestError("name a SPACE.yaml to search, or --resume the folder of a search: one of them")
    if resume is not None:
        plan = tuning.read_plan(Path(resume))
    else:
        assert space is not None
        plan = tuning.plan(
            parse_yaml(read_text(Path(space), "the space"), f"the space {space}"),
            method=method,
            budget=budget,
            goal=goal,
            prune=prune,
            seed=seed,
            population=population,
            interval=interval,
            recipe=recipe,
            simulation={} if cluster is None else {"cluster": cluster},
            storage=storage,
            options=options,
        )
    done = tuning.carry_out(plan, out=out, resume=resume, jobs=jobs, notify=print_progress)
    if json:
        print_json(done.search.to_json())
    else:
        for text in done.search.verdict():
            print(wrapped(text))
        if done.search.best() is not None:
            print_command("run it", f"polyrhythm train {shell(done.folder / tuning.BEST_FILE)}")
        print()
        heads, rows = done.search.table(ROWS)
        print_table("", heads, rows)
        print()
        print_labeled("report", f"{done.folder}/{tuning.REPORT_FILE}")
    if done.interrupted:
        print_progress(f"interrupted; continue with: polyrhythm tune --resume {done.folder}")
        raise typer.Exit(INTERRUPTED)
