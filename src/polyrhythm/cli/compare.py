"""`polyrhythm compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json, numbers, with_run_options
from polyrhythm.cli.output import print_json, print_labeled, print_progress, print_table, wrapped
from polyrhythm.errors import RequestError
from polyrhythm.user_files import parse_yaml

INTERRUPTED = 130


@partial(with_run_options, left_out=("strategy", "workers", "seed", "until"))
def compare(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | RUN…]", help="A YAML file of options, or runs that exist."),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help=(
                "Strategies, as synchronous; local_sgd(steps=16) (default with --cluster: ten of all "
                "families)."
            )
        ),
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, as 1,2,4.")] = "2",
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Runs per combination, each with another seed.")
    ] = 1,
    first_seed: Annotated[int, typer.Option(metavar="N", help="First seed.")] = 0,
    grid: Annotated[
        str | None,
        typer.Option(help="Values of other options, as lr=0.01,0.05; batch_size=32,64."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Target: top1=0.9, top5=0.99 or loss=0.3 (default: the best top-1 that all reach)."
        ),
    ] = None,
    tune: Annotated[
        str,
        typer.Option(
            help=(
                "lr, or lr=0.001..1: tune the learning rate of every strategy with equal effort (needs "
                "Optuna)."
            )
        ),
    ] = "",
    trials: Annotated[int, typer.Option(metavar="N", help="With --tune: number of tuning runs per row.")] = 8,
    cluster: Annotated[
        str | None, typer.Option(help="Simulate on a cluster file or a ready cluster (default: real runs).")
    ] = None,
    gradients: Annotated[
        str, typer.Option(metavar="real|none", help="With --cluster: none for dry runs.")
    ] = "real",
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="With --gradients none: steps of each worker.")
    ] = None,
    step_time: Annotated[str | None, typer.Option(help="With --cluster: compute time of a step.")] = None,
    faults: Annotated[
        str | None, typer.Option(help="With --cluster: faults to inject, as kill(rank=1, at_s=2).")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Parallel runs (default: one per core if simulated, else one)."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The folder, new or empty (default: a new one in runs/).")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Folder of a comparison to resume.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Compare strategies on one job, in real or simulated runs, or compare existing runs."""
    from polyrhythm.api import compare as comparing
    from polyrhythm.api.rehearsal import STRATEGIES

    given = [Path(each) for each in what or ()]
    folders = [path for path in given if path.is_dir()]
    if absent := [path for path in given if not path.exists()]:
        raise RequestError(f"there is no {absent[0]}: name folders of runs, or a recipe")
    if folders and strategies is None and resume is None:
        if len(folders) != len(given):
            raise RequestError("compare runs, or give one recipe with --strategies: not both")
        done = comparing.compare_runs(folders, until, out)
    else:
        if len(given) > 1 or folders:
            raise RequestError("give at most one recipe: --strategies makes new runs")
        if resume is not None:
            plan = comparing.read_plan(Path(resume))
        else:
            simulation = {"cluster": cluster, "steps": steps, "step_time": step_time, "faults": faults}
            simulation = {key: value for key, value in simulation.items() if value is not None}
            if gradients != "real":
                simulation["gradients"] = gradients
            plan = comparing.plan(
                given[0] if given else None,
                strategies=strategies or ("" if cluster is None else STRATEGIES),
                workers=numbers("--workers", workers, int, "1,2,4"),
                seeds=seeds,
                first_seed=first_seed,
                grid=_grid(grid),
                until=until,
                tune=tune,
                trials=trials,
                simulation=simulation,
                options=options,
            )
        done = comparing.carry_out(plan, out=out, resume=resume, jobs=jobs, notify=print_progress)
    if json:
        print_json(done.comparison.to_json())
    else:
        _print_result(done.folder, done.comparison)
    if done.interrupted:
        print_progress(f"interrupted; continue with: polyrhythm compare --resume {done.folder}")
        raise typer.Exit(INTERRUPTED)


def _print_result(folder: Path | None, comparison: Any) -> None:
    for text in comparison.verdict():
        print(wrapped(text))
    print()
    heads, rows = comparison.table(short=True)
    print_table("", heads, rows)
    print()
    for name, reason in comparison.refused.items():
        print_labeled("left out", f"{name}: {reason}")
    for text in comparison.warnings:
        print_labeled("note", text)
    if folder is not None:
        print_labeled("report", f"{folder}/report.html")


def _grid(text: str | None) -> dict[str, list[Any]]:
    from polyrhythm.specs import split_outside

    found: dict[str, list[Any]] = {}
    for part in split_outside(text or "", ";"):
        key, equals, values = part.partition("=")
        each = [parse_yaml(value, f"the grid {part!r}") for value in split_outside(values, ",")]
        if not equals or not each:
            raise RequestError(f"cannot read the grid {part!r}: write lr=0.01,0.05; batch_size=32,64")
        found[key.strip().replace("-", "_")] = each
    return found
