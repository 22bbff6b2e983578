"""`polyrhythm simulate`, also with `--seeds`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyrhythm.cli.options import Json, with_run_options
from polyrhythm.cli.output import (
    print_bottleneck,
    print_json,
    print_labeled,
    print_left_out,
    print_members,
    print_report_path,
    print_timings,
)
from polyrhythm.config.run_config import REAL_ONLY
from polyrhythm.errors import RequestError
from polyrhythm.launch.signals import INTERRUPTED
from polyrhythm.reporting.quantities import counted, duration, percent

if TYPE_CHECKING:
    from polyrhythm.simulation.trials import Failure


@partial(with_run_options, unmentioned=REAL_ONLY)
def simulate(
    cluster: Annotated[
        str, typer.Option(help="A cluster file, or a ready cluster: office, spot, bsc, h100_pair, …")
    ],
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file of options; the command line overrides it.")
    ] = None,
    gradients: Annotated[
        str,
        typer.Option(
            metavar="real|none",
            help="real: train; none: dry run, messages and times only, for thousands of workers.",
        ),
    ] = "real",
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --gradients none: steps of each worker, instead of epochs."),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(help="Compute time of a step, as exponential(mean=0.1) (default: the cluster's)."),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(help="Faults to inject, as kill(rank=1, at_s=2); slow(rank=2, factor=3)."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --gradients none: check the strategy's invariants.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --gradients none: try N seeds, with random faults unless --faults is given.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The run folder, new or empty (default: a new one in runs/).")
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Train in virtual time on a simulated cluster, or do a dry run without gradients."""
    given: dict[str, Any] = {
        "recipe": recipe,
        "cluster": cluster,
        "steps": steps,
        "step_time": step_time,
        "faults": faults,
    }
    if seeds is not None:
        try_seeds(gradients, out, {**given, "seeds": seeds, **options}, as_json=json)
    else:
        given |= {"gradients": gradients, "faults": faults or (), "check": check, "out": out}
        _simulate({**given, **options}, as_json=json)


def _simulate(options: dict[str, Any], *, as_json: bool) -> None:
    from polyrhythm.api.simulate import simulate as simulate_run
    from polyrhythm.reporting.progress import VIRTUAL, progress_for

    observer = progress_for(sys.stderr, mark=VIRTUAL)
    try:
        run = simulate_run(**options, observers=[observer])
    finally:
        observer.close()
    if run.outcome == "interrupted":
        print(f"interrupted; what there is of the run is in {run.folder}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if as_json:
        print_json(run.figures)
    else:
        _print_result(run.folder, run.figures)


_WORTH_SAYING = 0.01


def _print_result(folder: Any, figures: dict[str, Any]) -> None:
    price = figures["price"]
    cost = "not known" if price is None else f"{price:.4f} {figures['currency'] or '(currency not given)'}"
    learns = figures["gradients"] == "real"
    if learns:
        print_labeled("test", f"top-1 {percent(figures['test_top1'])}, top-5 {percent(figures['test_top5'])}")
        print_members(figures)
    while_all = figures["sustained_images_per_s"]
    differs = while_all is not None and while_all > (1 + _WORTH_SAYING) * figures["images_per_s"]
    sustained = f" ({while_all:,.0f} while all workers trained)" if differs else ""
    print_labeled(
        "trained in" if learns else "dry run in",
        f"{duration(figures['seconds'])} of virtual time at {figures['images_per_s']:,.0f} images/s{sustained}",
    )
    if "calibrated_within" in figures:
        print_labeled("interval", _interval(figures["images_per_s"], figures["calibrated_within"]))
    print_bottleneck(figures)
    print_left_out(figures)
    print_timings(figures)
    print_labeled("cluster", f"{figures['cluster']}, {counted(figures['hosts'], 'host')}, price {cost}")
    if learns and (folder / "model.safetensors").exists():  # of an ensemble each member has its own
        print_labeled("model", f"{folder}/model.safetensors")
    print_report_path(folder)
    if (folder / "trace.json").exists():
        print_labeled("timeline", f"{folder}/trace.json (for ui.perfetto.dev)")


def _interval(images_per_s: float, within: list[float] | None) -> str:
    if within is None:
        return "unknown: a value that the throughput depends on was not determined by `calibrate`"
    low, high = (images_per_s * end for end in within)
    return f"{low:,.0f} to {high:,.0f} images/s (80 %), by the calibration alone"


FAILED = 1


def try_seeds(gradients: str, out: str | None, request: dict[str, Any], *, as_json: bool) -> None:
    """Try many seeds, and print every failure with the command that repeats it."""
    from polyrhythm.api.simulate import try_strategy

    if gradients != "none":
        raise RequestError("--seeds goes with --gradients none: thousands of dry runs, not of trainings")
    if out is not None:
        raise RequestError("--seeds leaves no run folder: leave --out out, and repeat a seed with it")

    def print_progress(failure: Failure) -> bool:
        print(f"seed {failure.seed}: {failure.what}\n  {failure.command}", file=sys.stderr)
        return True

    tried = try_strategy(**request, on_failure=print_progress)
    if as_json:
        print_json(asdict(tried))
    else:
        print(f"{tried.seeds:,} seeds in {tried.seconds:.1f} s: {len(tried.failures):,} failed")
    if tried.failures:
        raise typer.Exit(FAILED)
