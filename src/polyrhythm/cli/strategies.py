"""`polyrhythm strategies`."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_table

SYMBOLS = "M: model's bytes, N: workers, R: replicas a group, H, K: steps between averages"


def strategies(
    name: Annotated[str | None, typer.Argument(help="One strategy, in detail.")] = None,
    json: Json = False,
) -> None:
    """List the strategies with their papers and costs."""
    from polyrhythm.api.strategies import strategies as known

    found = known(name)
    if json:
        print_json(found)
    elif name is None:
        print_table(SYMBOLS, ["name", "bytes a step", "staleness", "paper"], _by_family(found))
    else:
        entry = found[0]
        family = f" ({entry['family']})" if entry["family"] else ""
        print(f"{entry['name']}{family}: {entry['summary']}\n\n{entry['rule']}\n")
        facts = [
            ["bytes a step", entry["bytes_per_step"]],
            ["staleness", entry["staleness"]],
            ["use it for", entry["use_it"]],
            ["if a worker dies", entry["when_a_worker_dies"]],
            *([f"key {key}", f"default {value}"] for key, value in entry["keys"].items()),
        ]
        facts = [fact for fact in facts if fact[1]]  # one of your own may lack some
        print_table("", ["", ""], facts)


def _by_family(found: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row per strategy, grouped below a row per family; a column of families would take too much width."""
    rows = []
    for family, members in groupby(found, itemgetter("family")):
        rows.append([family, "", "", ""])
        rows += [
            [f"  {each['name']}", each["bytes_per_step"], each["staleness"], each["cited_as"]]
            for each in members
        ]
    return rows
