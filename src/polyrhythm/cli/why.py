"""`polyrhythm why`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_table, say

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
    causes = [each for each in found.causes if each.gain > _WORTH_SAYING]
    helping = [each for each in found.changes if each.gain > _WORTH_SAYING]
    if causes:
        say("bottleneck", f"{causes[0].what}: {_gain(causes[0].gain)} without it")
    else:
        say("bottleneck", f"none: without any other cause than computing {_gain(_WORTH_SAYING)} at most")
    if helping:
        say("remedy", f"{helping[0].what}: {_gain(helping[0].gain)}")
    else:
        say("remedy", f"none of the changes that were simulated gains more than {_gain(_WORTH_SAYING)}")
    if found.time:
        say("time", found.time)
    speed, dry = found.images_per_s, found.rehearsed_images_per_s
    text = f"{whole(speed)} images/s; its dry run {whole(dry)} (virtual), on {found.cluster}"
    say("speed", text + (", which --cluster names: other machines than the run's" if found.another else ""))
    if speed > 0 and not 1 / _FAR <= dry / speed <= _FAR:
        times = dry / speed if dry > speed else speed / dry
        say(
            "caution",
            f"the dry run is {times:.1f}× {'faster' if dry > speed else 'slower'} than the run: gains are ratios of "
            "dry runs, and hold for the run only roughly",
        )
    if found.compression:
        say("compression", found.compression)
    if causes:
        print()
        rows = [[each.what, _share(each.gain), each.remedy, _share(each.remedy_gain)] for each in causes]
        rows = [row if row[2] else [*row[:3], ""] for row in rows]
        print_table("causes", ["cause", "images/s without it", "remedy", "images/s with it"], rows)
    if helping:
        print()
        rows = [[each.what, _share(each.gain), each.caution] for each in helping]
        print_table("changes", ["change", "images/s", "caution"], rows)


_FAR = 1.25
"""Ratio to the speed of its dry run from which a run counts as different from it."""


def _gain(gain: float) -> str:
    return f"{_share(gain)} images/s"


def _share(gain: float) -> str:
    return f"{100 * gain:+.0f} %"
