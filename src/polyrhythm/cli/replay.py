"""`polyrhythm replay`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_labeled

DIFFERS = 1


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that has ended.")],
    out: Annotated[
        str | None,
        typer.Option(help="A new or empty folder for the replay's events, model and report (default: none)."),
    ] = None,
    json: Json = False,
) -> None:
    """Replay an asynchronous run bit for bit; exits with 1 if it differs."""
    from polyrhythm.api.replay import replay as replay_run

    found = replay_run(run, out=out)
    if json:
        print_json(found)
    else:
        _print_result(found)
    if not found["same"]:
        raise typer.Exit(DIFFERS)


def _print_result(found: dict[str, Any]) -> None:
    digests, difference = found["parameters_sha256"], found["first_difference"]
    if found["same"]:
        print(f"the same, bit for bit: {digests['replayed']}")
        print_labeled("played", f"{found['messages']:,} messages in {found['seconds']:.1f} s")
        return
    print(f"differs {difference['where']}: {difference['text']}")
    for cause in difference["possible_causes"]:
        print(f"may be due to {cause}")
    print_labeled("recorded", f"{digests['recorded']}")
    print_labeled("replayed", f"{digests['replayed'] or 'did not end'}")
