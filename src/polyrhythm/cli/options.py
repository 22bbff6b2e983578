"""Command-line options made from the run configuration, so that each is written only once."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from polyrhythm.config.run_config import RunConfig

PANELS = {
    "The job": ("data", "model", "strategy", "workers", "epochs", "batch_size", "seed"),
    "Learning": (
        *("optimizer", "schedule", "batch_schedule", "loss", "class_weights", "label_smoothing"),
        *("weight_average", "teacher", "temperature", "teacher_share"),
    ),
    "Starting from other weights": ("weights", "freeze", "freeze_epochs", "rate_decay"),
    "Pictures": ("augment", "image_size", "scale", "size_schedule", "pixels", "skip_unreadable"),
    "Speed": ("device", "precision", "threads", "cache", "decoded", "compile", "channels_last"),
    "What the run leaves": ("keep_checkpoints", "keep_best", "timings", "tensorboard"),
    "When something dies": ("restarts", "min_workers", "on_loss", "silence_s", "gather_s", "notice_s"),
    "The network": ("listen", "token_file", "vacant", "port"),
}
"""How `--help` shows the fields of `RunConfig`, each in one panel."""


def with_run_options(verb: Callable[..., None], unmentioned: Collection[str] = ()) -> Callable[..., None]:
    """Replace the `**options` of a verb by one option for every field of `RunConfig`.

    Options that are not given are not passed on, so that a recipe's values stay.

    Args:
        verb: the function to wrap.
        unmentioned: fields hidden from `--help`, because the verb refuses them with a reason.
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
    call.__signature__ = inspect.Signature([*annotated, *_options(unmentioned)])  # type: ignore[attr-defined]
    call.__doc__ = verb.__doc__
    call.__name__ = verb.__name__
    return call


def _options(unmentioned: Collection[str]) -> list[inspect.Parameter]:
    return [
        _option(name, panel, hidden=name in unmentioned) for panel, names in PANELS.items() for name in names
    ]


def _option(name: str, panel: str, *, hidden: bool) -> inspect.Parameter:
    info = RunConfig.model_fields[name]
    is_flag = info.annotation is bool
    text = info.description or ""
    if not is_flag and info.default is not None:
        text = f"{text.removesuffix('.')} (default: {info.default})."
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=text,
        show_default=False,
        metavar=_metavar(info.annotation),
        rich_help_panel=panel,
        hidden=hidden,
    )
    # All but flags are texts here, so that the command line and recipes have one set of checks and messages.
    annotation: Any = Annotated[(bool if is_flag else str) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in annotation.__args__ if part is not type(None))
    return {int: "N", float: "X", bool: ""}.get(annotation, "TEXT")
