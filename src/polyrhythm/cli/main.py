"""`polyrhythm`: the verbs, their `--help`, and how errors are printed.

The help of a verb, in addition to its options and arguments:

    --json              nothing: a flag
    --out TEXT          the kind of value it takes
    RUN                 the name of an argument, without a type
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from polyrhythm.cli.help import Interrupted, Verb, Verbs
from polyrhythm.errors import PolyrhythmError, RequestError, fault_of_machine, printable
from polyrhythm.launch.process import lost_output, tolerate_lost_output
from polyrhythm.launch.signals import PREEMPTED, Preempted, interruption
from polyrhythm.launch.torchrun.report_rank import (
    ReportedByLeader,
    adopt_step,
    is_silent,
    linger,
    started_by_torchrun,
)

WHAT = "Train image classifiers in parallel on slow networks, mixed hardware and machines that fail."
REQUEST_WRONG, RUN_FAILED = 2, 1
_LONGEST = 1500  # characters of a refusal, which may repeat what was given
USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Error class of the option parser: click's own, or that of the copy of click inside newer versions of typer."""

VERBS = {
    "Train": ("train", "run", "join", "submit"),
    "Use a trained model": ("evaluate", "predict", "export", "average"),
    "Choose": ("plan", "compare", "tune", "report", "why"),
    "Simulate and measure": ("simulate", "replay", "profile", "calibrate"),
    "Look up": ("strategies", "analyze", "augment", "doctor"),
}
"""The verbs by panel, as `--help` shows them: each is the function of its name in the module of its name."""


def command_line(only: str | None = None) -> typer.Typer:
    """Return the verbs and their options.

    Args:
        only: the one that is asked for, if that is known: the others need not be imported then.
    """
    app = typer.Typer(
        name="polyrhythm",
        cls=Verbs,
        help=WHAT,
        add_completion=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(polyrhythm)
    for panel, verbs in VERBS.items():
        for verb in verbs:
            if only not in (None, verb):
                continue
            # arguments after the script, or after the submitted command, belong to it
            settings = {"allow_interspersed_args": False} if verb in ("run", "submit", "profile") else None
            add = app.command(cls=Verb, rich_help_panel=panel, context_settings=settings)
            add(getattr(import_module(f"polyrhythm.cli.{verb}"), verb))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("polyrhythm"))
        raise typer.Exit


def polyrhythm(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Do nothing: the options outside verbs act when they are parsed."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a verb and exit with its status.

    0 done, 1 the run failed, 2 the request was wrong, 75 preempted (start it again), 130 interrupted.
    """
    if sys.stdout is sys.__stdout__:
        tolerate_lost_output()
    _replace_unencodable()
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if arguments[:1] and arguments[0] in _OF_SEVERAL_RANKS:
        adopt_step(os.environ)
    status = _exit_status(_status(arguments), arguments)
    if started_by_torchrun():
        # Threads of its links may still be ending, most of all in a rank that leaves early; they abort an interpreter
        # that
        # exits normally, which torchrun takes for a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


_OF_SEVERAL_RANKS = ("train", "profile")
"""Verbs that ranks do together which something else has started."""
_OF_OTHERS = ("submit",)
"""Verbs that read the options of others."""

_LEAVE_FILES = ("train", "simulate", "run", "join")
"""Verbs that are done once their files are written, even if their output could not be printed."""


def _exit_status(status: int, arguments: list[str]) -> int:
    """Report output that could not be written, and return the exit status; a closed pipe is no failure."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    lost = lost_output(1)
    if lost is None or isinstance(lost[1], BrokenPipeError):
        return status
    print(
        f"polyrhythm: {lost[0]} bytes could not be written to standard output ({lost[1].strerror})",
        file=sys.stderr,
    )
    return status or (0 if arguments[:1] and arguments[0] in _LEAVE_FILES else RUN_FAILED)


def _replace_unencodable() -> None:
    """Keep characters that standard output cannot encode from ending a verb; standard error replaces them by default.

    Under UTF-8 only file names contain such characters: their bytes are printed unchanged.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "replace")


def _status(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    alone = first not in _OF_OTHERS and any(first in verbs for verbs in VERBS.values())
    try:
        verb = command_line(first if alone else None)
        status = verb(arguments, standalone_mode=False)  # what typer.Exit was raised with, if it was
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        word, status = interruption(arguments)
        print(word, file=sys.stderr)
        return status
    except Exception as error:
        return _print_error(error)
    return status if isinstance(status, int) else 0


def _print_error(error: Exception) -> int:
    """Print an error, on one line if the user can correct it, and return the exit status."""
    error = fault_of_machine(error) or error
    # Under torchrun the leader has printed the error. torchrun reports the first rank to fail, so this one waits.
    if isinstance(error, ReportedByLeader) or (isinstance(error, USAGE_ERROR) and is_silent()):
        linger()
        return REQUEST_WRONG
    if isinstance(error, USAGE_ERROR):
        text = " ".join(error.format_message().split()).partition(", unable to parse")[0].removesuffix(".")
        return _fail(f"{text} (see {_verb_of(error)} --help)", REQUEST_WRONG)
    if isinstance(error, Preempted):
        return _fail(str(error), PREEMPTED)
    if isinstance(error, PolyrhythmError):
        return _fail(str(error), REQUEST_WRONG if isinstance(error, RequestError) else RUN_FAILED)
    if not isinstance(error, BrokenPipeError):  # the reader of the output has exited
        traceback.print_exc()
    return RUN_FAILED


def _verb_of(error: Any) -> str:
    """Return the command with the help that explains the mistake."""
    context = getattr(error, "ctx", None)
    return f"polyrhythm {context.info_name}" if context is not None and context.parent else "polyrhythm"


def _fail(text: str, status: int) -> int:
    if status == REQUEST_WRONG:
        text = printable(text) if len(text) <= _LONGEST else f"{printable(text[:_LONGEST])} …"
    print(f"error: {text}", file=sys.stderr)
    return status
