"""`polyrhythm augment`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.options import Json, names_in
from polyrhythm.cli.output import print_json
from polyrhythm.errors import RequestError


def augment(
    chain: Annotated[
        str | None,
        typer.Argument(
            metavar="AUGMENTATIONS", help='As in train, "rotation(strength=10); flip", or a recipe (.yaml).'
        ),
    ] = None,
    preview: Annotated[
        str, typer.Option("--preview", "--out", help="Image file to write.")
    ] = "augmented.png",
    data: Annotated[
        str | None,
        typer.Option(help="A name or a folder of images (default: the recipe's, else fashion-mnist)."),
    ] = None,
    pictures: Annotated[int, typer.Option(metavar="N", min=1, help="Number of images.")] = 6,
    variants: Annotated[int, typer.Option(metavar="N", min=1, help="How many variants of each.")] = 8,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Random seed (default: the recipe's)."),
    ] = None,
    corruptions: Annotated[
        str | None,
        typer.Option(
            metavar="fog,…", help="Corruptions to show at every severity instead; all for all of them."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Preview augmentations as a contact sheet of images and their variants."""
    from polyrhythm.api.augment import augment as sheet

    if (chain is None) == (corruptions is None) and not (chain or "").endswith((".yaml", ".yml")):
        raise RequestError(
            "name augmentations, such as rotation; flip, or a recipe, or --corruptions: one of them"
        )
    names = None
    if corruptions is not None:
        names = [] if corruptions == "all" else names_in(corruptions)
    found = sheet(
        chain, preview, data=data, pictures=pictures, variants=variants, seed=seed, corruptions=names
    )
    if json:
        print_json(found)
    else:
        print(f"{found['pictures']} images with {found['variants']} variants of each: {found['file']}")
