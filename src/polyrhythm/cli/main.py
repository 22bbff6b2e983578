"""`polyrhythm`: the verbs, and what an error looks like."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any, NoReturn

import click
import typer

from polyrhythm.cli.evaluate import evaluate

from polyrhythm.cli.strategies import strategies
from polyrhythm.cli.train import INTERRUPTED, train
from polyrhythm.errors import PolyrhythmError, RequestError

REQUEST_WRONG, RUN_FAILED = 2, 1

app = typer.Typer(
    name="polyrhythm",
    help="Train image classifiers on several workers: in step, out of step, or mixed.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(evaluate)
app.command()(strategies)



def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("polyrhythm"))
        raise typer.Exit


@app.callback()
def polyrhythm(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Train image classifiers on several workers: in step, out of step, or mixed."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs a verb and leaves with its status: 0 done, 1 the run failed, 2 the request was wrong, 130 interrupted."""
    sys.exit(_status(arguments))


def _status(arguments: list[str] | None) -> int:
    try:
        status: Any = app(arguments, standalone_mode=False)
    except RequestError as error:
        return _fail(str(error), REQUEST_WRONG)
    except click.ClickException as error:
        return _fail(" ".join(error.format_message().split()), REQUEST_WRONG)
    except PolyrhythmError as error:
        return _fail(str(error), RUN_FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone
        return RUN_FAILED
    except Exception:
        traceback.print_exc()
        return RUN_FAILED
    return status if isinstance(status, int) else 0


def _fail(text: str, status: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    return status
