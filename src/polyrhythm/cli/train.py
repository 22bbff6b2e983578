"""`polyrhythm train`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json, with_run_options
from polyrhythm.cli.output import (
    print_bottleneck,
    print_cache,
    print_json,
    print_labeled,
    print_left_out,
    print_members,
    print_report_path,
    print_timings,
    rate,
)
from polyrhythm.launch.process import loading
from polyrhythm.launch.signals import INTERRUPTED, PREEMPTED
from polyrhythm.reporting.quantities import duration, percent


@with_run_options
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file of options; the command line overrides it.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The run folder, new or empty (default: a new one in runs/).")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="The folder of a run to resume; auto: that of --out, if it exists.")
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Train an image classifier on several workers; writes a run folder with the model and a report."""
    with loading():
        from polyrhythm.api.train import prepare_process
        from polyrhythm.api.train import train as train_run
        from polyrhythm.reporting.progress import progress_for

    prepare_process()
    observer = progress_for(sys.stderr)
    try:
        run = train_run(recipe, out=out, resume=resume, observers=[observer], start_method="fork", **options)
    finally:
        observer.close()
    if run is None:
        return
    if run.preempted:
        print(f"preempted; continue with: polyrhythm train --resume {run.folder}", file=sys.stderr)
        raise typer.Exit(PREEMPTED)
    if run.outcome == "interrupted":
        print(f"interrupted; continue with: polyrhythm train --resume {run.folder}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if run.before:
        done = f"done its {run.figures['epochs']} epochs already; --epochs asks for more"
        if run.figures.get("reached"):
            done = "reached its target already; another --until asks for more"
        print(f"notice: {run.folder} has {done}", file=sys.stderr)
    if json:
        print_json(run.figures)
    else:
        _print_result(run.folder, run.figures)


def _print_result(folder: Any, figures: dict[str, Any]) -> None:
    print_labeled("test", f"top-1 {percent(figures['test_top1'])}, top-5 {percent(figures['test_top5'])}")
    best = figures.get("best")
    if best is not None and best["test_top1"] > figures["test_top1"]:
        print_labeled(
            "highest",
            f"top-1 {percent(best['test_top1'])} after epoch {best['epoch']}, selected on the test images, hence "
            "optimistic; --keep-best keeps such a network, and evaluate --best tests it",
        )
    if "fine_tuning" in figures:
        print_labeled("kept", figures["fine_tuning"]["text"])
    print_members(figures)
    print_labeled("trained in", f"{duration(figures['seconds'])} at {rate(figures['images_per_s'])} images/s")
    print_bottleneck(figures)
    print_left_out(figures)
    print_cache(figures)
    print_timings(figures)
    if (folder / "model.safetensors").exists():  # of an ensemble each member has its own
        print_labeled("model", f"{folder}/model.safetensors")
    print_report_path(folder)
