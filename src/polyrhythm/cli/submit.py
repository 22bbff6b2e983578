"""`polyrhythm submit`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from polyrhythm.cli.output import JSON_HELP, print_json, print_progress
from polyrhythm.errors import RequestError, unknown


def submit(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VERB …", help="The command, without `polyrhythm`.", show_default=False),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="slurm(nodes=2), ray, kubernetes(image='…') or ssh(hosts='hosts.txt').")
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the job has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job without submitting it.")] = False,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Submit a job to Slurm, Ray, Kubernetes or hosts over SSH."""
    from polyrhythm.api.submit import engine_from, submission_of

    if not engine:
        raise RequestError("name the engine with --engine: slurm, ray, kubernetes or ssh")
    if not command:
        raise RequestError(
            "name the command behind --, as in: polyrhythm submit --engine slurm -- train recipe.yaml"
        )
    chosen = engine_from(engine)
    submission = submission_of(chosen, command, _values(ctx, command))
    if dry_run:
        texts = dict(chosen.texts(submission))
        if json:
            print_json(texts)
        else:
            for name, text in texts.items():
                print(text if len(texts) == 1 else f"# {name}\n{text}", end="")
        return
    outcome = chosen.submit(submission, print_progress, wait)
    if json:
        print_json(asdict(outcome))
    else:
        print_progress(outcome.remark)
    if outcome.status:
        raise typer.Exit(outcome.status)


def _values(ctx: Any, command: list[str]) -> dict[str, Any]:
    """Return the values of a command's options as its verb would read them; what the verb refuses is refused here."""
    verbs = ctx.parent.command.commands
    if command[0] not in verbs:
        raise unknown("verb", command[0], verbs)
    with verbs[command[0]].make_context(command[0], command[1:], parent=ctx.parent) as inside:
        return {key: value for key, value in inside.params.items() if value is not None}
