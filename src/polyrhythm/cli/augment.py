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
    images: Annotated[int, typer.Option(metavar="N", min=1, help="Number of images.")] = 6,
    variants: Annotated[int, typer.Option(metavar="N", min=1, help="Variants of each image.")] = 8,
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
    count: Annotated[
        int | None,
        typer.Option(
            metavar="SIDE",
            min=1,
            help="Print the numbers of variants of images with that many pixels a side.",
        ),
    ] = None,
    pictures: Annotated[int | None, typer.Option(hidden=True)] = None,
    json: Json = False,
) -> None:
    """Preview augmentations as a contact sheet of images and their variants."""
    from polyrhythm.api.augment import augment as sheet
    from polyrhythm.api.augment import combinations

    if (chain is None) == (corruptions is None) and not (chain or "").endswith((".yaml", ".yml")):
        raise RequestError(
            "name augmentations, such as rotation; flip, or a recipe, or --corruptions: one of them"
        )
    if count is not None:
        if chain is None:
            raise RequestError("--count counts augmentations: name some, such as rotation; flip")
        counted = combinations(chain, count)
        if json:
            print_json(
                {
                    "side": count,
                    "combinations": [{"name": name, "number": number} for name, number in counted],
                }
            )
        else:
            for name, number in counted:
                print(f"{name:<20} {'not counted' if number is None else f'{number:,}'}")
        return
    names = None
    if corruptions is not None:
        names = [] if corruptions == "all" else names_in(corruptions)
    images = images if pictures is None else pictures
    found = sheet(chain, preview, data=data, images=images, variants=variants, seed=seed, corruptions=names)
    if json:
        print_json(found)
    else:
        print(f"{found['images']} images with {found['variants']} variants of each: {found['file']}")
