"""What a verb's `--help` shows beside its options and arguments.

--json              nothing: a flag
--out TEXT          what kind of value it takes
RUN                 an argument's name, and nothing beside it
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Verb(TyperCommand):
    """A verb of the command line."""

    def get_params(self, ctx: Any) -> Any:
        """Gives the options, `--help` among them, in words of people and not of Python's types."""
        return _with_plain_metavars(super().get_params(ctx))


class Verbs(TyperGroup):
    """The command line itself."""

    def get_params(self, ctx: Any) -> Any:
        """Gives the options of no verb, likewise."""
        return _with_plain_metavars(super().get_params(ctx))


def _with_plain_metavars(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if each.param_type_name == "argument":
            each.metavar = each.metavar or each.name.upper()
            each.display_type_rich = _no_type  # newer typers show Python's beside the name
        elif each.metavar is None:
            each.metavar = "" if each.is_flag else "TEXT"
    return parameters


def _no_type(ctx: Any) -> str:
    return ""
