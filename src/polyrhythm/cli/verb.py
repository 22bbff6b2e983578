"""What a verb's `--help` shows beside its options: nothing for a flag, TEXT or N for what takes a value."""

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
        if each.param_type_name == "option" and each.metavar is None:
            each.metavar = "" if each.is_flag else "TEXT"
    return parameters
