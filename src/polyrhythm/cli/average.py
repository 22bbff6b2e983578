"""`polyrhythm average`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.options import Device, Json, Network, TestData
from polyrhythm.cli.output import print_json
from polyrhythm.reporting.quantities import percent


def average(
    weights: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_WEIGHTS", help="Runs of one network; one alone: its checkpoints."),
    ],
    out: Annotated[str, typer.Option(help="The file of weights to write.")] = "average.safetensors",
    data: TestData = None,
    model: Network = None,
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy", help=("Leave out networks that reduce the accuracy on every second test image.")
        ),
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Average the weights of several runs, or of one run's checkpoints."""
    from polyrhythm.api.average import average as average_weights

    found = average_weights(weights, out, data=data, model=model, greedy=greedy, device=device)
    if json:
        print_json(found)
        return
    print(f"mean of {len(found['averaged'])}: {', '.join(found['averaged'])}")
    print(f"top-1 {percent(found['test_top1'])}    top-5 {percent(found['test_top5'])}    {found['file']}")
