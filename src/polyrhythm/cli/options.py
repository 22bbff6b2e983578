"""Command-line options made from the run configuration, so that each is written down once."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from polyrhythm.config.run_config import RunConfig


def with_run_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb that takes `**options` one option for every field of `RunConfig`.

    Options that are not given are not passed, so that a recipe's values stay.
    """
    own = [
        parameter
        for parameter in inspect.signature(verb).parameters.values()
        if parameter.kind != parameter.VAR_KEYWORD
    ]
    names = [parameter.name for parameter in own]

    def call(**given: Any) -> None:
        fixed = {name: given.pop(name) for name in names}
        verb(**fixed, **{key: value for key, value in given.items() if value is not None})

    hints = typing.get_type_hints(verb, include_extras=True)
    annotated = [
        parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY) for parameter in own
    ]
    call.__signature__ = inspect.Signature([*annotated, *_options()])  # type: ignore[attr-defined]
    call.__doc__ = verb.__doc__
    call.__name__ = verb.__name__
    return call


def _options() -> list[inspect.Parameter]:
    made = []
    for name, info in RunConfig.model_fields.items():
        default = "" if info.default is None else f" (default: {info.default})"
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=f"{info.description}{default}",
            show_default=False,
            metavar=_metavar(info.annotation),
        )
        # All but flags are texts here, so that the command line and recipes have one set of checks and messages.
        annotation: Any = Annotated[(bool if info.annotation is bool else str) | None, option]
        made.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return made


def _metavar(annotation: Any) -> str | None:
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in annotation.__args__ if part is not type(None))
    return {int: "N", float: "X", bool: None}.get(annotation, "TEXT")
