"""How a run of `train` lets others in: its door, and what people and programs are told of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

from polyrhythm.claim import Superseded
from polyrhythm.config.recipe import CONFIG_FILE, read_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.dataset import Dataset
from polyrhythm.launch.joining.address import parse_address
from polyrhythm.launch.joining.admission import Admission
from polyrhythm.launch.joining.entrance import Entrance
from polyrhythm.launch.joining.token import TOKEN_FILE, draw_token, read_token
from polyrhythm.roles.job import Job

JOIN_FILE = "join.json"
"""In the run folder while the run can be joined: address, token file, and the command."""


@contextmanager
def entrance_of(job: Job, config: RunConfig) -> Iterator[Entrance | None]:
    """Makes the entrance that a run's configuration asks for; None if it asks for none.

    Args:
        job: whose folder is there.
        config: as the user wishes.

    Raises:
        RequestError: the address or the token cannot be used.
    """
    folder = job.keeping.folder
    if config.listen is None or folder is None:
        yield None
        return
    address, given = parse_address(config.listen), read_token(config.token_file)
    drawn = None
    if given is None:
        given, drawn = draw_token(folder, job.keeping.claim)
    entrance = Entrance(address, given)
    entrance.offer = {
        "version": version("polyrhythm"),
        "folder": str(folder),
        "config": read_recipe(folder / CONFIG_FILE)
        | {"restarts": job.losses.restarts},  # under torchrun none
        "data": facts_of(job.dataset),
    }
    file = drawn or config.token_file
    command = f"polyrhythm join {entrance.address}" + (f" --token-file {file}" if file else "")
    knowing = "" if file else ", with POLYRHYTHM_TOKEN in the environment"
    entrance.how = f"others may join at {entrance.address}: {command}{knowing}"
    told = {"address": str(entrance.address), "token_file": str(file) if file else None, "command": command}
    claim = job.keeping.claim
    claim.draft(folder / JOIN_FILE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    claim.publish(folder / JOIN_FILE)
    try:
        yield entrance
    finally:
        entrance.close()
        with suppress(Superseded):
            for name in (JOIN_FILE, TOKEN_FILE):
                claim.remove(folder / name)


def admission_of(job: Job, config: RunConfig, entrance: Entrance | None = None) -> Admission | None:
    """Gives what a rank that torchrun has started must know of how others come in; None if they cannot.

    Args:
        job: whose folder may hold the token, which rank 0 has drawn if it was given none.
        config: as the user wishes.
        entrance: rank 0's.

    Raises:
        RequestError: the address or the token cannot be used.
    """
    folder = job.keeping.folder
    if config.listen is None or folder is None:
        return None
    given = read_token(config.token_file)

    def token() -> str | None:
        drawn = folder / TOKEN_FILE
        return read_token(drawn) if given is None and drawn.is_file() else given

    return Admission(parse_address(config.listen), token, entrance)


def facts_of(dataset: Dataset) -> dict[str, Any]:
    """Gives what data must have in common to be the same: images, their shape, and the classes."""
    classes = json.dumps([str(name) for name in dataset.classes])
    return {
        "images": len(dataset.train),
        "shape": list(dataset.image_shape),
        "classes": len(dataset.classes),
        "names": hashlib.sha256(classes.encode(errors="backslashreplace")).hexdigest(),
    }
