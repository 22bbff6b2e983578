"""`polyrhythm augment`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.output import JSON_HELP, print_json


def augment(
    chain: Annotated[
        str, typer.Argument(metavar="AUGMENTATIONS", help='As in train: "rotation(strength=10); flip".')
    ],
    preview: Annotated[str, typer.Option(help="The picture file to write.")] = "augmented.png",
    data: Annotated[
        str, typer.Option(help="A name (fashion-mnist, digits) or a folder of images.")
    ] = "fashion-mnist",
    pictures: Annotated[int, typer.Option(metavar="N", min=1, help="How many pictures.")] = 6,
    variants: Annotated[int, typer.Option(metavar="N", min=1, help="How many variants of each.")] = 8,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Chooses the pictures and their changes.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Show what augmentation makes of pictures: a contact sheet, each beside its variants."""
    from polyrhythm.api.augment import augment as sheet

    found = sheet(chain, preview, data=data, pictures=pictures, variants=variants, seed=seed)
    if json:
        print_json(found)
    else:
        print(f"{found['pictures']} pictures with {found['variants']} variants of each: {found['file']}")
