"""Command-line options made from the run configuration, so that each is written only once."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection
from importlib import resources
from typing import Annotated, Any, TypeVar

import typer

from polyrhythm.cli.output import JSON_HELP
from polyrhythm.config.run_config import FORMER_KEYS, RunConfig
from polyrhythm.errors import RequestError

Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Network = Annotated[str | None, typer.Option(help="The network (default: the run's).")]
TestData = Annotated[str | None, typer.Option(help="Test data (default: the run's data).")]
Dense = Annotated[
    bool, typer.Option("--dense", help="Apply the network at every position of the whole image.")
]
TenCrop = Annotated[
    bool, typer.Option("--ten-crop", help="Average over corners, center, and their mirror images.")
]
Flip = Annotated[bool, typer.Option("--flip", help="Average over mirror images, too.")]
Scales = Annotated[
    str | None, typer.Option(metavar="224,256,…", help="Pixels of the shorter side; average over all.")
]
"""Options of several verbs."""
Number = TypeVar("Number", int, float)


def numbers(option: str, text: str | None, kind: type[Number], example: str) -> list[Number]:
    """Return the numbers of a list with commas between; raise `RequestError` where it is none."""
    try:
        return [] if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise RequestError(f"{option} {text!r} is not a list of {what}: write {example}") from None


def names_in(text: str | None) -> list[str]:
    """Return the names of a list with commas between."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def with_run_options(
    verb: Callable[..., None], unmentioned: Collection[str] = (), left_out: Collection[str] = ()
) -> Callable[..., None]:
    """Replace the `**options` of a verb by one option for every field of `RunConfig`.

    Options that are not given are not passed on, so that a recipe's values stay.

    Args:
        verb: the function to wrap.
        unmentioned: fields hidden from `--help`, because the verb refuses them with a reason.
        left_out: fields for which the verb has arguments of its own.
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

    # typer reads the signature of its argument, so the wrapper has to look like a function with these options.
    hints = typing.get_type_hints(verb, include_extras=True)
    annotated = [
        parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY) for parameter in own
    ]
    options = [
        _option(name, hidden=name in unmentioned) for name in RunConfig.model_fields if name not in left_out
    ]
    options += [_former_option(former) for former, name in FORMER_KEYS.items() if name not in left_out]
    call.__signature__ = inspect.Signature([*annotated, *options])  # type: ignore[attr-defined]
    call.__doc__ = verb.__doc__
    call.__name__ = verb.__name__
    return call


def _option(name: str, *, hidden: bool) -> inspect.Parameter:
    info = RunConfig.model_fields[name]
    extra = info.json_schema_extra
    assert isinstance(extra, dict)
    is_flag = info.annotation is bool
    text = info.description or ""
    if name in _CHOICES:
        text = f"{text} Choices: {', '.join(_names_in(*_CHOICES[name]))}."
    if not is_flag and info.default is not None:
        text = f"{text.removesuffix('.')} (default: {info.default})."
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=text,
        show_default=False,
        metavar=_metavar(info.annotation),
        rich_help_panel=str(extra["panel"]),
        hidden=hidden,
    )
    # All but flags are texts here, so that the command line and recipes have one set of checks and messages.
    annotation: Any = Annotated[(bool if is_flag else str) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _former_option(name: str) -> inspect.Parameter:
    annotation: Any = Annotated[str | None, typer.Option(f"--{name.replace('_', '-')}", hidden=True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in annotation.__args__ if part is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(typing.get_args(annotation))
    return {int: "N", float: "X", bool: ""}.get(annotation, "TEXT")


_CHOICES = {
    "compress": ("compression/compressors",),
    "optimizer": ("training/optimizers", "training/joint_optimizers"),
    "schedule": ("training/schedules",),
    "batch_schedule": ("training/batch_schedules",),
    "loss": ("training/losses",),
    "augment": ("augmentation/transforms",),
    "size_schedule": ("training/size_schedules",),
}
"""Folders with the choices of an option as modules."""


def _names_in(*folders: str) -> list[str]:
    """Return the names of choices; the folders are not imported, because torch would be."""
    files = (path for folder in folders for path in (resources.files("polyrhythm") / folder).iterdir())
    return sorted(path.name.removesuffix(".py") for path in files if re.fullmatch(r"[a-z]\w*\.py", path.name))
