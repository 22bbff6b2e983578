"""`polyrhythm evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.output import JSON_HELP, percent, print_json, print_table


def evaluate(
    weights: Annotated[
        str, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or a file of weights.")
    ],
    data: Annotated[str | None, typer.Option(help="What to test on (default: the run's data).")] = None,
    model: Annotated[str | None, typer.Option(help="The network (default: the run's).")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 500,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Pixels a side (default: as in the run).")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out broken images.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Test a trained model: top-1, top-5, and every class."""
    from polyrhythm.api.evaluate import evaluate as evaluate_weights

    found = evaluate_weights(
        weights,
        data=data,
        model=model,
        batch_size=batch_size,
        device=device,
        image_size=image_size,
        skip_unreadable=skip_unreadable,
    )
    if json:
        print_json(found)
        return
    print(f"{found['model']} on {found['images']:,} test images of {found['data']}")
    print(
        f"top-1 {percent(found['test_top1'])}    top-5 {percent(found['test_top5'])}    loss {found['test_loss']:.4f}"
    )
    rows = [
        [entry["name"], f"{entry['images']:,}", percent(entry["recall"]), percent(entry["precision"])]
        for entry in found["per_class"]
    ]
    print_table("", ["class", "images", "recall", "precision"], rows)
