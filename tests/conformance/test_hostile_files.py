"""Files of ours, damaged in hundreds of ways: they are read, or refused in one line; nothing else happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.message import Kind, Message
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.errors import RequestError, RunError
from polyrhythm.models.weights import load_weights, save_weights
from polyrhythm.roles.checkpointing.recording import ARRIVALS_FILE, read_recording
from polyrhythm.simulation.cluster import cluster_text, open_cluster, ready_clusters
from polyrhythm.training.checkpoint import load_checkpoint, save_checkpoint
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

MUTATIONS = 300
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, -0.5, 1e308, float("inf"), float("nan"), "", "x", "1e9999", "sgd(lr=nan)",
    "((((", "\0", [], [[]], {}, {"x": 1}, [1, "x", None], "9" * 5000,
)  # fmt: skip

Read = Callable[[Path], object]


def other_bytes(random: Random, raw: bytes) -> bytes:
    """Changes some bytes, cuts some out, doubles some, or puts others in between."""
    start, length = random.randrange(len(raw)), random.choice([1, 2, 8, 64])
    piece = raw[start : start + length]
    instead = random.choice(
        [b"", piece * 2, random.randbytes(len(piece)), b"\xff" * len(piece), b"\0" * len(piece), None]
    )
    return raw[:start] if instead is None else raw[:start] + instead + raw[start + length :]


def other_value(random: Random, value: Any) -> Any:
    """Puts a value that nobody expects in the place of any one inside a structure, or leaves one out."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.2:
        return random.choice(NASTY)
    copy = value.copy()
    key = random.choice(list(copy)) if isinstance(copy, dict) else random.randrange(len(copy))
    if random.random() < 0.1:
        del copy[key]
    else:
        copy[key] = other_value(random, copy[key])
    return copy


def checkpoint(path: Path) -> Read:
    save_checkpoint(
        path, {"values": torch.arange(50.0), "step": torch.tensor(3)}, {"epoch": 1, "steps": [1, 2]}
    )
    return load_checkpoint


def weights(path: Path) -> Read:
    save_weights(nn.Linear(7, 3), path, {"model": "linear"})
    return lambda file: load_weights(nn.Linear(7, 3), file)


def pickled_weights(path: Path) -> Read:
    torch.save(nn.Linear(7, 3).state_dict(), path)
    return lambda file: load_weights(nn.Linear(7, 3), file)


def cluster(path: Path) -> Read:
    path.write_text(cluster_text(open_cluster(ready_clusters()[0])))
    return open_cluster


def recipe(path: Path) -> Read:
    keys = {"strategy": "parameter_server(servers=2)", "optimizer": "sgd(lr=0.1)", "workers": 4, "epochs": 2}
    path.write_text(yaml.safe_dump(keys))
    return lambda file: configure(read_recipe(file))


def plan(path: Path) -> Read:
    spans = Span(0, 5, {"lr": 0.1, "betas": [0.9, 0.99]}), Span(5, 9, {"lr": 0.2, "weight_decay": 0.1})
    path.write_text(json.dumps(OptimizerPlan("Adam", spans, 0.1).to_json()))

    def read(file: Path) -> object:
        try:
            record = json.loads(file.read_text())
        except (ValueError, RecursionError):
            raise RequestError("as unpack_json refuses it") from None
        vector = torch.zeros(9)
        made = OptimizerPlan.from_json(record)
        if made.spans and made.spans[-1].stop <= 9:
            made.build(vector).step(torch.ones(9), made.rate)  # what is accepted can be carried out
        return made

    return read


def arrivals(path: Path) -> Read:
    heard = Arrivals()
    for source in (0, 1, 1, 0):
        heard.note(source, Message(Kind.PUSH, torch.ones(3)))
    record = {
        "job": {"model": "mlp"}, "workers": [0, 1], "servers": [2], "resumed": False, "outcome": "done",
        "parameters_sha256": "0" * 64, "device": "cpu", "threads": 1, "torch": "2", "workers_lost": 0,
        "ranks": {"2": heard.to_json()},
    }  # fmt: skip
    path.write_text(json.dumps(record))
    return lambda file: read_recording(file.parent)


FILES: dict[str, tuple[str, Callable[[Path], Read]]] = {
    "checkpoint": ("step-00000001.safetensors", checkpoint),
    "weights": ("model.safetensors", weights),
    "pickled weights": ("model.pt", pickled_weights),
    "cluster": ("cluster.yaml", cluster),
    "recipe": ("recipe.yaml", recipe),
    "plan": ("plan.json", plan),
    "arrivals": (ARRIVALS_FILE, arrivals),
}


def structure(path: Path) -> tuple[Any, Callable[[Any], str]] | None:
    """Gives what a file of text says, and how to write it; None for others."""
    if path.suffix == ".json":
        return json.loads(path.read_text()), json.dumps
    if path.suffix == ".yaml":
        return yaml.safe_load(path.read_text()), partial(yaml.safe_dump, allow_unicode=True)
    return None


@pytest.mark.parametrize("what", FILES)
def test_a_damaged_file_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    name, make = FILES[what]
    path, random = tmp_path / name, Random(0)
    read = make(path)
    read(path)  # as it is, it can be read
    raw, said = path.read_bytes(), structure(path)
    refusals = []
    for number in range(MUTATIONS):
        if said is not None and number % 2:
            damaged = said[1](other_value(random, said[0])).encode()
        else:
            damaged = other_bytes(random, raw)
        path.write_bytes(damaged)
        try:
            read(path)
        except (RequestError, RunError) as refusal:
            refusals.append(str(refusal))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {damaged[:300]!r}") from error
    assert len(refusals) > MUTATIONS / 10
    assert [text for text in refusals if len(text.splitlines()) != 1 or len(text) > 2000] == []


@pytest.mark.parametrize("what", ["cluster", "recipe"])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 4_000,
        "epochs: 2001-99-99",
        "epochs: " + "9" * 5000,
        "a: &a [1]\n"
        + "\n".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]"
            for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "? [1, 2]\n: 3",
        "!!python/object/apply:os.getcwd []",
        "epochs: 0b",
    ],
    ids=["deep", "date", "digits", "aliases", "key", "object", "binary"],
)
def test_yaml_that_hides_something_is_refused_in_one_line(what: str, text: str, tmp_path: Path) -> None:
    name, make = FILES[what]
    read = make(tmp_path / name)
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError) as refusal:
        read(tmp_path / name)
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) < 2000
