"""`polyrhythm plan`."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyrhythm.cli.options import Json, numbers, with_run_options
from polyrhythm.cli.output import print_command, print_json, print_labeled, print_progress, print_table
from polyrhythm.config.run_config import REAL_ONLY
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from polyrhythm.api.plan import Plan

_SHOWN = 12


@partial(with_run_options, left_out=("strategy", "workers", "seed", "until"), unmentioned=REAL_ONLY)
def plan(
    cluster: Annotated[str, typer.Option(help="A cluster file or a ready cluster; `profile` writes yours.")],
    target: Annotated[str, typer.Option(help="top1=0.9, top5=0.99 or loss=0.3; images=1e6: by dry runs.")],
    strategies: Annotated[
        str | None, typer.Option(help="Candidates, separated by ; (default: ten of all families).")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(help="Candidate numbers of workers, as 1,2,4 (default: up to the size of the cluster)."),
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Candidate per-worker batch sizes, as 32,64.")
    ] = None,
    rates: Annotated[str | None, typer.Option(help="Candidate learning rates, as 0.05,0.1.")] = None,
    compressors: Annotated[
        str,
        typer.Option(
            help=(
                "Candidate compressors, as int8; top_k(density=0.01); auto: those that gain in a dry run; or"
                " none."
            )
        ),
    ] = "auto",
    machines: Annotated[
        str,
        typer.Option(help="Candidate machines of the cluster's price list, separated by ;, or all."),
    ] = "",
    budget: Annotated[str | None, typer.Option(help="Highest price, as 20 or 20USD.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Longest time, as 90s, 30m or 2h.")] = None,
    optimize: Annotated[
        str | None,
        typer.Option(
            metavar="time|money", help="Objective (default: money with a deadline alone, else time)."
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(metavar="N", help="Largest number of candidates that are trained in simulation.")
    ] = 24,
    seeds: Annotated[int, typer.Option(metavar="N", help="Seeds of candidates that may be the best.")] = 3,
    trial_epochs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Largest number of epochs of a trial (default: 8 times --epochs)."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Parallel trials (default: one per core).")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The folder of the trials (default: a new one in runs/).")
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Recommend a strategy, workers and servers for a cluster, by simulated time or price to a target."""
    from polyrhythm.api.plan import CONSIDERED
    from polyrhythm.api.plan import plan as planned

    money, currency = _money(budget)
    found = planned(
        cluster=cluster,
        target=target,
        strategies=CONSIDERED if strategies is None else strategies,
        workers=None if workers is None else numbers("--workers", workers, int, "1,2,4"),
        batch_sizes=numbers("--batch-sizes", batch_sizes, int, "32,64"),
        rates=numbers("--rates", rates, float, "0.01,0.05"),
        compressors=compressors,
        machines=machines,
        budget=money,
        currency=currency,
        deadline_s=_seconds(deadline),
        optimize=optimize,
        trials=trials,
        seeds=seeds,
        trial_epochs=trial_epochs,
        out=out,
        jobs=jobs,
        notify=print_progress,
        **options,
    )
    if json:
        print_json(found.to_json())
    else:
        _print_result(found)


def _print_result(found: Plan) -> None:
    table = found.table()
    print_labeled("recommended", table.reason)
    print_command("run it", table.command)
    print()
    print_table(table.heading, list(table.heads), [list(row) for row in table.rows[:_SHOWN]])
    print()
    for text in table.notes:
        print_labeled("", text)
    for what, why in table.left_out[:_SHOWN]:
        print_labeled("left out", f"{what}: {why}")
    if len(table.left_out) > _SHOWN:
        print_labeled("", f"and {len(table.left_out) - _SHOWN} more, in the report")
    print_labeled("report", f"{found.folder}/report.html")


def _money(text: str | None) -> tuple[float | None, str]:
    """Read `20`, `20USD` or `20 USD`."""
    if text is None:
        return None, ""
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]*)\s*", text)
    try:
        return float(found[1] if found else "?"), found[2] if found else ""
    except ValueError:
        raise RequestError(f"cannot read the budget {text!r}: write 20 or 20USD") from None


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(text: str | None) -> float | None:
    """Read `90`, `90s`, `30m`, `2h` or `1d`."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+)\s*([smhd]?)\s*", text)
    try:
        return float(found[1]) * _UNITS[found[2]] if found else float("?")
    except ValueError:
        raise RequestError(f"cannot read the deadline {text!r}: write 90s, 30m or 2h") from None
