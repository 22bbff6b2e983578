"""Recipes: a run's whole configuration as a YAML file, with the same keys as the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.claim import open_new
from polyrhythm.config.run_config import RunConfig, renamed
from polyrhythm.config.weight_facts import weight_facts
from polyrhythm.errors import RequestError
from polyrhythm.escaping import shell
from polyrhythm.models.fine_tuning import pixels_of
from polyrhythm.run_files import read_json_in_run, read_text_in_run
from polyrhythm.specs import Config, Spec, validated
from polyrhythm.user_files import parse_yaml, read_text

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
RUN_FORMAT = 1
"""Version of what is in a run folder; it increases whenever a version of before would read one wrongly."""


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the keys and values of a recipe; `configure` checks them.

    Raises:
        RequestError: no such file, or not a YAML mapping.
    """
    return _keys(read_text(shipped(path), "the recipe"), path)


def read_run_recipe(path: Path) -> dict[str, Any]:
    """Read the keys and values of the recipe in a run folder; `configure` checks them.

    Raises:
        RequestError: no such file, a link, or not a YAML mapping.
    """
    return _keys(read_text_in_run(path, "the recipe"), path)


def _keys(text: str, path: Path) -> dict[str, Any]:
    read = parse_yaml(text, f"the recipe {path}")
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise RequestError(
            f"the recipe {path} must be lines of `key: value`, with keys as on the command line"
        )
    named = {key.replace("-", "_"): value for key, value in read.items()}
    if len(named) < len(read):
        raise RequestError(f"the recipe {path} gives a key twice, with - and with _: leave one of them out")
    return renamed(named)


_SHARED = Path("share", "polyrhythm")


def shipped(path: Path) -> Path:
    """Return where a recipe is: `recipes/demo.yaml` also where it was installed, if there is none of the user's own."""
    if path.exists() or path.is_absolute():
        return path
    installed = Path(sys.prefix) / _SHARED / path
    return installed if installed.is_file() else path


def check_format(folder: Path) -> None:
    """Refuse the folder of a run that a later version has written in another format.

    Raises:
        RequestError: a later version has written the folder.
    """
    try:
        environment = read_json_in_run(folder / ENVIRONMENT_FILE)
    except (RequestError, OSError):  # there is none to be read: not of a later one
        return
    number, by = environment.get("format", 1), str(environment.get("polyrhythm", "a later version"))
    if isinstance(number, int) and number > RUN_FORMAT:
        raise RequestError(
            f"{folder} has format {number}, and this version reads up to {RUN_FORMAT}: use the one that wrote it, "
            f"Polyrhythm {by:.40}"
        )


def read_run(path: Path) -> dict[str, Any]:
    """Read the configuration that a run has written, with the defaults of the version that wrote it.

    Raises:
        RequestError: see `read_recipe`, or the run folder has a later format.
    """
    check_format(path.parent)
    return {"batches": "static"} | read_run_recipe(path)


def read_run_folder(folder: Path) -> dict[str, Any]:
    """Read the configuration of a run that is to be resumed; see `read_run`.

    Raises:
        RequestError: see `read_run`, or the folder is not one of a run.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RequestError(f"{folder} is not a run folder (it has no {CONFIG_FILE}): name the one to resume")
    return read_run(path)


def as_command(words: Sequence[str], options: Mapping[str, object]) -> str:
    """Return a command of `polyrhythm`, to be pasted into a shell.

    Args:
        words: the verb, and what follows it.
        options: options by key; None and False are omitted.
    """
    command = ["polyrhythm", *words]
    for key, value in options.items():
        if value is not None and value is not False:
            command += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    return " ".join(map(shell, command))


_HOW_LONG = ("epochs", "updates")


def configure(*layers: Mapping[str, object]) -> RunConfig:
    """Merge layers of values, with precedence for later ones, and check the result.

    A length given by one of two keys replaces an earlier one given by the other.

    Raises:
        RequestError: unknown key, or a value out of range.
    """
    merged: dict[str, Any] = {}
    for layer in map(renamed, layers):
        if any(layer.get(key) is not None for key in _HOW_LONG):
            merged = {key: value for key, value in merged.items() if key not in _HOW_LONG}
        merged |= layer
    # Pretrained weights are useless with pixels normalized otherwise, so they decide unless the user does.
    if merged.get("pixels") is None and (wanted := _pixels_for(merged.get("weights"))) is not None:
        merged["pixels"] = wanted
    return validated("the run", RunConfig, merged)


def _pixels_for(weights: Any) -> Any:
    """Return the pixel normalization that weights were trained with; None if it is not recorded."""
    if not isinstance(weights, str):
        return None
    path = Path(weights) / CONFIG_FILE
    if os.path.isfile(path):
        return read_run_recipe(path).get("pixels")
    return weight_facts(Path(weights)).get("pixels") if os.path.isfile(weights) else pixels_of(weights)


def write_recipe(config: RunConfig, path: Path) -> None:
    """Write a configuration as a recipe that repeats the run."""
    text = yaml.safe_dump(plain_values(config), sort_keys=False, allow_unicode=True)
    with open_new(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def check_writable(verb: str, options: Mapping[str, object]) -> None:
    """Reject objects among the options of a verb that starts its runs from files.

    Raises:
        RequestError: an option is not a text, a number, a path, a spec, or a list of these.
    """
    for key, value in options.items():
        several = list(value) if isinstance(value, list | tuple) else [value]
        if not all(
            each is None or isinstance(each, str | int | float | Path | Config | Spec) for each in several
        ):
            raise RequestError(
                f"{verb} starts its runs from files, so {key} must be text or numbers (given {type(value).__name__}): "
                "polyrhythm.train and polyrhythm.simulate take objects"
            )


def plain_values(config: RunConfig) -> dict[str, Any]:
    """Return a configuration's values as texts and numbers, from which `configure` makes it again."""
    return {key: _plain(getattr(config, key)) for key in type(config).model_fields}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Config | Spec | Path):
        return str(value)
    return f"<your own {type(value).__qualname__}>"
