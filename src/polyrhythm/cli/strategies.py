"""`polyrhythm strategies`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.output import JSON_HELP, print_json, print_table

SYMBOLS = "M: bytes of the model, N: workers, R: replicas in a group"


def strategies(
    name: Annotated[str | None, typer.Argument(help="One strategy, in detail.")] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """List the strategies, with their paper and cost."""
    from polyrhythm.api.strategies import strategies as known

    found = known(name)
    if json:
        print_json(found)
    elif name is None:
        rows = [
            [entry["name"], entry["family"], entry["bytes_per_step"], entry["staleness"], entry["cited_as"]]
            for entry in found
        ]
        print_table(SYMBOLS, ["name", "family", "bytes a step", "staleness", "paper"], rows)
    else:
        entry = found[0]
        print(f"{entry['name']} ({entry['family']}): {entry['summary']}\n\n{entry['rule']}\n")
        facts = [
            ["bytes a step", entry["bytes_per_step"]],
            ["staleness", entry["staleness"]],
            ["use it for", entry["use_it"]],
        ]
        facts += [["if a worker dies", entry["when_a_worker_dies"]]]
        facts += [[f"key {key}", f"default {value}"] for key, value in entry["keys"].items()]
        print_table("", ["", ""], facts)
