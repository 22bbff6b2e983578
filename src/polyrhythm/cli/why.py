"""`polyrhythm why`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_table

_WORTH_SAYING = 0.02


def why(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Its machines, for a real run: what `profile` wrote (default: what it was simulated on)."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what bound a finished run, and what would help most, by rehearsing it otherwise."""
    from polyrhythm.api.why import why as explained
    from polyrhythm.reporting.quantities import whole

    found = explained(run, cluster=cluster)
    if json:
        print_json(found.to_json())
        return
    if found.held_back:
        print(f"bound by    {found.held_back}")
    print(
        f"speed       {whole(found.images_per_s)} images/s; its rehearsal {whole(found.rehearsed_images_per_s)}, with "
        "which the others are compared"
    )
    if found.compression:
        print(f"compression {found.compression}")
    print()
    helping = [each for each in found.changes if each.gain > _WORTH_SAYING]
    rows = [[each.what, f"{100 * each.gain:+.0f} %", each.caution] for each in helping]
    if rows:
        print_table("what would help", ["change", "images/s", "but"], rows)
    else:
        print("nothing that was tried would make it faster by more than 2 %")
