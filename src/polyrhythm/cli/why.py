"""`polyrhythm why`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_labeled, print_table

_WORTH_SAYING = 0.02


def why(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Machines to simulate: a cluster file or a ready cluster (default: the run's own)."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Find the bottleneck of a finished run and the best remedy, by simulating the run with one change at a time."""
    from polyrhythm.api.why import why as explained
    from polyrhythm.reporting.quantities import whole

    found = explained(run, cluster=cluster)
    if json:
        print_json(found.to_json())
        return
    helping = [each for each in found.changes if each.gain > _WORTH_SAYING]
    first = found.causes[0] if found.bottleneck and found.causes else None
    causes = [each for each in found.causes if each.gain > _WORTH_SAYING]
    if found.bottleneck.startswith("none"):
        print_labeled("bottleneck", found.bottleneck)
        first = None
    elif first is None or (first.gain <= _WORTH_SAYING and not first.remedy):
        print_labeled(
            "bottleneck", f"none: without any other cause than computing {_gain(_WORTH_SAYING)} at most"
        )
    else:
        print_labeled("bottleneck", found.bottleneck)
    if first is not None and first.remedy:
        remedy, gain = first.remedy, first.remedy_gain
    elif helping:
        remedy, gain = helping[0].what, helping[0].gain
    else:
        remedy, gain = "", 0.0
    if remedy:
        print_labeled("remedy", remedy + (f": {_gain(gain)}" if gain > 0 else ""))
    else:
        print_labeled(
            "remedy", f"none of the changes that were simulated gains more than {_gain(_WORTH_SAYING)}"
        )
    if found.time:
        print_labeled("time", found.time)
    speed, dry = found.images_per_s, found.rehearsed_images_per_s
    text = f"{whole(speed)} images/s; its dry run {whole(dry)} (virtual), on {found.cluster}"
    print_labeled(
        "speed", text + (", which --cluster names: other machines than the run's" if found.another else "")
    )
    if speed > 0 and not 1 / _FAR <= dry / speed <= _FAR:
        times = dry / speed if dry > speed else speed / dry
        print_labeled(
            "caution",
            f"the dry run is {times:.1f}× {'faster' if dry > speed else 'slower'} than the run: gains are ratios of "
            "dry runs, and hold for the run only roughly",
        )
    if found.compression:
        print_labeled("compression", found.compression)
    if causes:
        print()
        rows = [[each.what, _share(each.gain), each.remedy] for each in causes]
        print_table("causes", ["cause", "images/s without it", "remedy"], rows)
    if others := [each for each in helping if each.what != remedy]:
        print()
        rows = [[each.what, _share(each.gain), each.caution] for each in others]
        print_table(
            "other changes" if len(others) < len(helping) else "changes",
            ["change", "images/s with it", "caution"],
            rows,
        )


_FAR = 1.25
"""Ratio to the speed of its dry run from which a run counts as different from it."""


def _gain(gain: float) -> str:
    return f"{_share(gain)} images/s"


def _share(gain: float) -> str:
    return f"{100 * gain:+.0f} %"
