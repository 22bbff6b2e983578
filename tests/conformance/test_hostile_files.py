"""Files of ours, damaged in hundreds of ways: they are read, or refused in one line; nothing else happens.

The files of a run folder are damaged where they lie, and replaced by links, pipes and folders.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import polyrhythm
from conformance.jobs import UNEVEN, make_job, resumed, simulated, stop_at
from polyrhythm.api.loop.loop_storage import INDEX, write_folder
from polyrhythm.api.served import load_served
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.message import Kind, Message
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.config.trained import ENSEMBLE_FILE, load_trained, voters
from polyrhythm.errors import RequestError, RunError, fault_of_machine
from polyrhythm.models.weights import load_weights, save_weights
from polyrhythm.reporting.comparison import read_run as read_compared
from polyrhythm.reporting.pages.report import PREDICTION_FILE, write_report
from polyrhythm.reporting.summary import SUMMARY_FILE, read_summary
from polyrhythm.roles.checkpointing.recording import ARRIVALS_FILE, read_recording
from polyrhythm.simulation.cluster import cluster_text, open_cluster
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan
from sample import seeds
from unit.api.loop.test_run_state import Run as LoopRun
from unit.api.loop.test_run_state import straight
from unit.api.loop.test_run_state import train as train_loop
from unit.api.loop.threads import run_in_threads

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
    path.write_text(cluster_text(open_cluster("bsc")))
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


@cache
def template() -> Path:
    """Makes a run folder with all files that a run may have."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"), "run")
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    run = polyrhythm.train(
        data="digits", model="mlp(hidden=[8])", workers=1, epochs=2, strategy="parameter_server", timings=True,
        keep_best=True, start_method="fork", out=folder,
    )  # fmt: skip
    assert run is not None
    polyrhythm.evaluate(folder, calibrate=True)
    told = {"cluster": "one.yaml", "images_per_s": 900.5, "waiting_share": 0.25, "held_back": "computing"}
    (folder / PREDICTION_FILE).write_text(json.dumps(told))
    known = {key: run.figures[key] for key in ("test_loss", "test_top1", "test_top5", "seconds", "epochs")}
    (folder / ENSEMBLE_FILE).write_text(json.dumps(known | {"members": [{"run": "member-0"}]}))
    write_report(folder)
    return folder


def in_run(read: Read) -> Callable[[Path], Read]:
    """Gives what makes a run folder around a file, which it has, and then the way to read that file."""

    def make(path: Path) -> Read:
        shutil.copytree(template(), path.parent, dirs_exist_ok=True)
        return lambda file: read(file.parent)

    return make


def served(folder: Path) -> object:
    return load_served(folder)


def ensemble(folder: Path) -> object:
    for name in ("events.jsonl", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    return voters(folder), read_summary(folder)


def report(folder: Path) -> object:
    # A page that was drawn from damaged figures must still be a page.
    text = write_report(folder).read_text()
    assert text.startswith("<!DOCTYPE html>")
    return text


FILES: dict[str, tuple[str, Callable[[Path], Read]]] = {
    "checkpoint": ("step-00000001.safetensors", checkpoint),
    "weights": ("model.safetensors", weights),
    "pickled weights": ("model.pt", pickled_weights),
    "cluster": ("cluster.yaml", cluster),
    "recipe": ("recipe.yaml", recipe),
    "plan": ("plan.json", plan),
    "arrivals": (ARRIVALS_FILE, arrivals),
    "events": ("events.jsonl", in_run(report)),
    "environment": ("environment.json", in_run(report)),
    "pictures": ("pictures.json", in_run(report)),
    "prediction": (PREDICTION_FILE, in_run(report)),
    "trace": ("trace.json", in_run(report)),
    "summary": (SUMMARY_FILE, in_run(read_compared)),
    "ensemble": (ENSEMBLE_FILE, in_run(ensemble)),
    "configuration": ("config.yaml", in_run(load_trained)),
    "data record": ("data.json", in_run(load_trained)),
    "model of a run": ("model.safetensors", in_run(served)),
    "calibration": ("model.calibration.json", in_run(served)),
}


def structure(path: Path) -> tuple[Any, Callable[[Any], str]] | None:
    """Gives what a file of text says, and how to write it; None for others."""
    if path.suffix == ".json":
        return json.loads(path.read_text()), json.dumps
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()], lines_of
    if path.suffix == ".yaml":
        return yaml.safe_load(path.read_text()), partial(yaml.safe_dump, allow_unicode=True)
    return None


def lines_of(values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in (values if isinstance(values, list) else [values]))


TOLERANT = {"pictures", "prediction", "trace", "summary"}
"""Files of which a page or a table shows nothing where they are damaged."""


@pytest.mark.parametrize("what", FILES)
def test_a_damaged_file_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    name, make = FILES[what]
    path, random = tmp_path / name, Random(0)
    read = make(path)
    read(path)  # as it is, it can be read
    raw, said = path.read_bytes(), structure(path)
    refusals = []
    tried = seeds(range(MUTATIONS))
    for number in tried:
        if said is not None and number // 4 % 2:
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
    assert what in TOLERANT or len(refusals) > len(tried) / 10
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


def places_in(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Gives the way to every value inside a structure."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in ((*place, key), *places_in(value[key], (*place, key)))]


def with_other(value: Any, place: tuple[Any, ...], instead: Any) -> Any:
    """Gives a copy of a structure with another value in a place, or with none for KeyError."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    if instead is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = instead
    return copy


FORGED = (*NASTY[:-1], 10**6, KeyError)


def of_same_type(random: Random, value: Any) -> Any:
    """Gives another value of the same type, as whoever wants to be believed would write it."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return random.choice([value + 1, value - 1, -value - 1, type(value)(0), type(value)(2**31)])
    if isinstance(value, str):
        return random.choice(["", "synchronous", value * 2, value[::-1]])
    parts = list(value.items()) if isinstance(value, dict) else value
    return type(value)(random.choice([parts[:0], parts[1:], parts[:1], parts[::-1]]))


@pytest.mark.parametrize(
    "spec",
    ["synchronous", "local_sgd(steps=2)", "sgp", "parameter_server(servers=2)", "ssp", "easgd", "hogwild"],
)
def test_facts_of_a_checkpoint_that_were_forged_are_refused_in_one_line(spec: str, tmp_path: Path) -> None:
    """The checksum fits: the file was written so. The run ends, or is refused; it never breaks or waits for ever."""
    job = make_job(spec, 3, folder=tmp_path, optimizer="sgd(lr=0.05, momentum=0.9)")
    simulated(job, stop_at(0.047))
    path, random = checkpoints(tmp_path / "checkpoints")[0], Random(0)
    assert path is not None
    tensors, facts = load_checkpoint(path)
    places, refusals = places_in(json.loads(json.dumps(facts))), []
    tried = seeds(range(40))
    for number in tried:
        place, instead = random.choice(places), random.choice(FORGED)
        if number % 2:
            instead = of_same_type(random, reduce(getitem, place, facts))
        for other in path.parent.iterdir():
            other.unlink()
        save_checkpoint(path, tensors, with_other(facts, place, instead))
        try:
            simulated(resumed(job), UNEVEN)
        except (RequestError, RunError) as refusal:
            refusals.append(str(refusal))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {instead!r:.40} in {place}") from error
    assert len(refusals) > len(tried) / 6
    assert [text for text in refusals if len(text.splitlines()) != 1 or "deadlock" in text] == []


@pytest.mark.parametrize(
    ("spec", "draws", "place", "instead", "said"),
    [
        ("synchronous", False, ("workers", "1", "account", "step"), 1, "different numbers of steps"),
        ("ad_psgd", True, ("deal", "units", 2, "grants", 0, 4), 10**6, "no unit has been granted"),
        ("ad_psgd", True, ("deal", "units", 1, "grants", 0, 3), 10**6, "no unit has been granted"),
        ("ad_psgd", True, ("deal", "free", 1), [[0, 10**6]], "epoch 1 has no images"),
    ],
)
def test_plausible_facts_that_contradict_others_are_refused(
    spec: str, draws: bool, place: tuple[Any, ...], instead: Any, said: str, tmp_path: Path
) -> None:
    """Such a run waited for ever, or took hours to count."""
    job = replace(make_job(spec, 3, folder=tmp_path), draws=draws)
    simulated(job, stop_at(0.047))
    path = checkpoints(tmp_path / "checkpoints")[0]
    assert path is not None
    tensors, facts = load_checkpoint(path)
    save_checkpoint(path, tensors, with_other(facts, place, instead))
    with pytest.raises(RequestError, match=said):
        simulated(resumed(job))


@pytest.mark.parametrize(
    ("spec", "name", "change", "said"),
    [
        ("synchronous", "worker.0.part.state.0.momentum_buffer", lambda it: it.repeat(2), "has the shape"),
        ("easgd", "worker.1.part.optimizer.state.0.momentum_buffer", lambda it: it[:-1], "has the shape"),
        (
            "parameter_server(servers=2)",
            "server.1.optimizer.state.0.momentum_buffer",
            lambda it: it[1:],
            "has the",
        ),
        (
            "parameter_server(servers=2)",
            "server.0.values",
            lambda it: it.repeat(2),
            "shards of its servers are not",
        ),
        (
            "parameter_server(servers=2)",
            "server.1.values",
            lambda it: it.double(),
            "shards of its servers are not",
        ),
        ("ssp", "server.0.values", lambda it: it[:-1], "shards of its servers are not"),
        ("local_sgd(steps=3)", "worker.1.part.vector", lambda it: it[:-1], "vector has the shape"),
        ("bmuf(steps=3)", "worker.1.part.outer.model", lambda it: it.repeat(2), "model has the shape"),
        ("slowmo(steps=3)", "worker.1.part.outer.buffer", lambda it: it[1:], "buffer has the shape"),
        ("diloco(steps=2, fragments=2)", "worker.1.part.global", lambda it: it[1:], "global has the shape"),
        ("d_psgd", "worker.1.part.parameters", lambda it: it[:1], "parameters has the shape"),
        ("sgp", "worker.1.part.numerator", lambda it: it.view(1, -1), "numerator has the shape"),
        ("sgp(overlap=true)", "worker.1.part.arrived.0", lambda it: it[:1], "arrived.0 has the shape"),
        (
            "d_psgd(compress=int8(dense_below=0))",
            "worker.1.part.copies.own",
            lambda it: it[:1],
            "own has the shape",
        ),
    ],
)
def test_tensors_of_another_shape_are_refused(
    spec: str, name: str, change: Callable[[torch.Tensor], torch.Tensor], said: str, tmp_path: Path
) -> None:
    job = make_job(spec, 3, folder=tmp_path, optimizer="sgd(lr=0.05, momentum=0.9)")
    simulated(job, stop_at(0.047))
    path = checkpoints(tmp_path / "checkpoints")[0]
    assert path is not None
    tensors, facts = load_checkpoint(path)
    save_checkpoint(path, tensors | {name: change(tensors[name])}, facts)
    with pytest.raises(RequestError, match=said):
        simulated(resumed(job))


@pytest.mark.parametrize(
    ("place", "instead", "said"),
    [
        (("workers", "0", "account", "staleness"), "x", "does not fit this run"),
        (("workers", "0", "account", "step"), 10**9, "more workers or steps than its run can have had"),
        (("servers", 0, "optimizer", "groups", 0, "momentum"), {"x": 1}, "cannot be used"),
        (("servers", 0, "version"), KeyError, "does not fit this run"),
        (("seconds",), float("nan"), "it holds the number nan"),
        (("servers", 0, "steps", 0), 10**400, "more than 64 bits"),
        (("job", "optimizer"), {}, "does not record what it was trained with"),
    ],
)
def test_a_run_resumed_from_forged_facts_ends_with_one_line(
    place: tuple[Any, ...], instead: Any, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(template(), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    path = checkpoints(folder)[0]
    assert path is not None
    tensors, facts = load_checkpoint(path)
    for other in folder.iterdir():
        other.unlink()
    save_checkpoint(path, tensors, with_other(facts, place, instead))
    capfd.readouterr()
    with pytest.raises((RequestError, RunError), match=said) as refusal:
        polyrhythm.train(resume=tmp_path / "run", epochs=3, start_method="fork")
    assert len(str(refusal.value).splitlines()) == 1
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server(servers=1)"])
def test_values_of_a_loops_saved_folder_that_were_forged_are_refused_in_one_line(
    spec: str, tmp_path: Path
) -> None:
    (whole,) = straight(spec, 1)
    write_folder(whole.saved["middle"], tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / INDEX).read_text())
    places, random, refusals = places_in(index), Random(0), []
    tried = seeds(range(24))
    for number in tried:
        place, instead = random.choice(places), random.choice(FORGED)
        if number % 2:
            instead = of_same_type(random, reduce(getitem, place, index))
        try:
            (tmp_path / "saved" / INDEX).write_text(json.dumps(with_other(index, place, instead)))
        except ValueError:  # of more digits than Python writes
            continue
        try:
            run_in_threads(spec, 1, lambda group: train_loop(group, LoopRun(), folder=tmp_path / "saved"))
        except (RequestError, RunError) as refusal:
            refusals.append(str(refusal))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {instead!r:.40} in {place}") from error
    assert len(refusals) > len(tried) / 6
    assert [text for text in refusals if len(text.splitlines()) != 1] == []


def outsider(kind: str, path: Path, secret: Path) -> None:
    """Puts something in the place of a file that no run folder holds."""
    path.unlink()
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "dangling link":
        path.symlink_to(secret.with_name("made"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


SECRET = "hunter2-is-the-password"
OUTSIDERS = ("link", "dangling link", "pipe", "device", "folder")

VERBS: dict[str, Callable[[Path], object]] = {
    "report": write_report,
    "evaluate": lambda run: polyrhythm.evaluate(run, calibrate=True),
    "best": lambda run: polyrhythm.evaluate(run, best=True),
    "predict": served,
    "compare": read_compared,
    "replay": read_recording,
    "resume": lambda run: polyrhythm.train(resume=run, epochs=3, start_method="fork"),
}


def outcome(act: Callable[[Path], object], run: Path) -> tuple[str, bool]:
    """Gives what an act returned, or why it was refused, and whether it was."""
    try:
        return repr(act(run)), False
    except (RequestError, RunError) as refusal:
        return str(refusal), True
    except OSError as error:  # the command line makes a line of it
        line = fault_of_machine(error)
        if line is None:
            raise
        return str(line), True


def names_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", OUTSIDERS)
def test_no_verb_follows_what_a_file_of_a_run_folder_was_replaced_by(kind: str, tmp_path: Path) -> None:
    """Every file by turns: nothing outside is changed or shown, nothing waits, and a refusal has one line."""
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text(SECRET)
    names = names_of(template())
    assert {"config.yaml", "data.json", "events.jsonl", "model.safetensors", "report.html"} <= set(names)
    for name in names:
        for verb, act in VERBS.items():
            if verb == "resume" and (name not in RESUMED_WITH or kind not in ("link", "pipe")):
                continue
            run = tmp_path / "run"
            shutil.copytree(template(), run)
            outsider(kind, run / name, secret)
            shown, is_refusal = outcome(act, run)
            assert not is_refusal or len(shown.splitlines()) == 1, (verb, name)
            assert SECRET not in shown, (verb, name)
            assert names_of(outside) == ["secret"], (verb, name)
            assert secret.read_text() == SECRET, (verb, name)
            for path in run.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    assert SECRET.encode() not in path.read_bytes(), (verb, name, path)
            shutil.rmtree(run)


RESUMED_WITH = {"config.yaml", "data.json", "events.jsonl", "environment.json"}


def test_the_folder_of_checkpoints_may_be_a_link_and_hard_links_are_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(template(), run)
    (run / "checkpoints").rename(tmp_path / "large-disk")
    (run / "checkpoints").symlink_to(tmp_path / "large-disk")
    os.link(run / "data.json", tmp_path / "second-name")
    assert polyrhythm.evaluate(run, best=True)["images"] == 359
    done = polyrhythm.train(resume=run, epochs=3, start_method="fork")
    assert done is not None
    assert done.outcome == "done"


def test_a_text_of_a_run_is_only_a_text_in_its_page(tmp_path: Path) -> None:
    """Every text of every event and of every other file is markup in turn."""
    evil = "<img src=x onerror=alert(1)>"
    shutil.copytree(template(), tmp_path / "run")
    log = tmp_path / "run" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]

    def spoiled(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: spoiled(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [spoiled(inner) for inner in value]
        return evil if isinstance(value, str) and name not in ("event", "png") else value

    log.write_text(lines_of([spoiled(event) for event in events]))
    for name in ("environment.json", "pictures.json", PREDICTION_FILE):
        path = tmp_path / "run" / name
        path.write_text(json.dumps(spoiled(json.loads(path.read_text()))))
    (tmp_path / "run" / "config.yaml").write_text(f"epochs: 1\ndata: {evil!r}\n")
    page = write_report(tmp_path / "run").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]"
    for old, new in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize("key", ["strategy", "data", "augment", "model", "workers"])
def test_aliases_of_aliases_do_not_grow(key: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{BOMB}\n{key}: *l\n")
    assert len(path.read_bytes()) < 1000
    with pytest.raises(RequestError, match="has aliases that stand for more than 10,000 further values"):
        read_recipe(path)
    with pytest.raises(RequestError, match="has aliases that stand for more than"):
        polyrhythm.tune(path, data="digits", model="mlp")
    path.write_text("strategy: &a [*a]\n")
    with pytest.raises(RequestError, match="has an alias inside its own value"):
        read_recipe(path)


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: &m mlp\ndata: *m\n")
    assert read_recipe(path) == {"model": "mlp", "data": "mlp"}
