"""`polyrhythm simulate --seeds`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from polyrhythm.cli.output import print_json
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from polyrhythm.simulation.trials import Failure

FAILED, INTERRUPTED = 1, 130


def try_seeds(gradients: str, out: str | None, request: dict[str, Any], *, as_json: bool) -> None:
    """Tries many seeds, and prints every failure with the command that repeats it.

    Args:
        gradients: must be `none`.
        out: must be left out: nothing is written.
        request: what `try_strategy` takes.
        as_json: whether standard output gets one JSON object.
    """
    from polyrhythm.api.trials import try_strategy

    if gradients != "none":
        raise RequestError("--seeds goes with --gradients none: thousands of rehearsals, not of trainings")
    if out is not None:
        raise RequestError("--seeds leaves no run folder: leave --out out, and repeat a seed with it")

    def tell(failure: Failure) -> bool:
        print(f"seed {failure.seed}: {failure.what}\n  {failure.command}", file=sys.stderr)
        return True

    try:
        tried = try_strategy(**request, on_failure=tell)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(tried.to_json())
    else:
        print(f"{tried.seeds:,} seeds in {tried.seconds:.1f} s: {len(tried.failures):,} failed")
    if tried.failures:
        raise typer.Exit(FAILED)
