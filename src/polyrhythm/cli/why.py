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
        typer.Option(help="Other machines, or what `profile` wrote (default: those that the run was on)."),
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
    where = f"on {found.cluster}" + (
        ", which --cluster names: not what the run was on" if found.another else ""
    )
    print(
        f"speed       {whole(found.images_per_s)} images/s; its dry run {whole(found.rehearsed_images_per_s)}, {where}"
    )
    if found.compression:
        print(f"compression {found.compression}")
    print()
    rows = [
        [
            each.what,
            f"{100 * each.gain:+.0f} %",
            each.remedy,
            f"{100 * each.remedy_gain:+.0f} %" if each.remedy else "",
        ]
        for each in found.causes
        if each.gain > _WORTH_SAYING
    ]
    if rows:
        print_table("what costs most", ["cause", "images/s without it", "remedy", "images/s with it"], rows)
        print()
    else:
        print("no cause of slowness: without any of them it would be faster by 2 % at most\n")
    helping = [each for each in found.changes if each.gain > _WORTH_SAYING]
    rows = [[each.what, f"{100 * each.gain:+.0f} %", each.caution] for each in helping]
    if rows:
        print_table("what would help", ["change", "images/s", "but"], rows)
    else:
        print("nothing that was tried would make it faster by more than 2 %")
