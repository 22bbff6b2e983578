"""Wrong requests, drawn from a seed: each must be refused in one line, with status 2 and nothing written.

Used by `test_wrong_inputs.py`, which tries some of them at every change, and by `benchmarks/wrong-inputs`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import UnionType
from typing import Any, get_args
from unittest import mock

from polyrhythm.cli.main import main
from polyrhythm.config.run_config import RunConfig

TRAIN = ["train", "--data", "digits", "--model", "mlp(hidden=[4])"]
SIMULATE = ["simulate", "--data", "digits", "--model", "mlp(hidden=[4])", "--gradients", "none", "--cluster"]
NOT_WHOLE = ["x", "1.5", "1:30", "", "1e3", "true", "-", "0x10", "²", "9" * 4300 + ".0", "NaN", "[1]", "two"]
NOT_NUMBERS = ["x", "", "1:30", "0x1p3", "1,5", "--", "[0.5]", "½", "1e"]
NOT_SPECS = [
    *(
        "nothing_such",
        "",
        "(",
        "a(",
        "a)",
        "sgd(lr)",
        "f(x=)",
        "f(1)",
        "lambda: 1",
        "__import__('os')",
        "f(a=1, a=2)",
    ),
    *(
        "a b",
        "a;b",
        "\x00",
        "\x1b[31mred",
        "line\nend",
        "f(" * 200 + ")" * 200,
        "a" * 5000,
        "{}",
        "'",
        "./",
        "async",
    ),
]
LONG = "a" * 300
SPECS = ("strategy", "model", "optimizer", "schedule", "batch_schedule", "loss", "augment", "size_schedule")


@dataclass(frozen=True)
class Wrong:
    """A wrong request.

    Attributes:
        kind: of the mistake.
        arguments: of `polyrhythm`.
        prepare: makes the files that it names in the present folder.
    """

    kind: str
    arguments: list[str]
    prepare: Callable[[], None] = lambda: None


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def options(random: Random) -> Wrong:
    """An option of a run with a value that it cannot have."""
    name, info = random.choice(sorted(RunConfig.model_fields.items()))
    annotation: Any = info.annotation
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    least = [
        value for rule in info.metadata for value in (getattr(rule, "ge", None), getattr(rule, "gt", None))
    ]
    if int in kinds:
        low = next((value for value in least if value is not None), None)
        values = NOT_WHOLE + ([str(int(low) - 1), str(-(10**30))] if low is not None else [])
    elif float in kinds:
        values = NOT_NUMBERS + (["-1e300"] if any(value is not None for value in least) else [])
    elif name in SPECS or name in ("device", "precision", "cache"):
        values = [value for value in NOT_SPECS if not (name == "augment" and not value.strip())]
        values = [value for value in values if not (name == "cache" and value == "")]
    elif annotation is bool or annotation is str or str in kinds:
        return recipes(random)
    else:  # one of some words
        values = ["x", "", "\x00", "None()", LONG]
    value = random.choice(values)
    train = TRAIN if name != "model" else TRAIN[:3]
    return Wrong(f"option {name}", [*train, f"{flag(name)}={value}", "--out", "run"])


RECIPES = {
    "key twice": "workers: 2\nworkers: 3\n",
    "key twice, spelt twice": "keep-best: true\nkeep_best: false\n",
    "sexagesimal": "workers: 1:30\n",
    "unknown key": "wrokers: 2\n",
    "list": "- workers\n",
    "text": "workers",
    "nothing": "",
    "open": "workers: [\n",
    "tab": "workers:\n\t- 1\n",
    "alias of itself": "a: &a [*a]\n",
    "code": "!!python/object/apply:os.system ['true']\n",
    "float": "workers: 2.0\n",
    "truth": "workers: true\n",
    "date": "workers: 2001-01-01\n",
    "impossible date": "workers: 2001-99-99\n",
    "mapping": "workers: {a: 1}\n",
    "number as key": "1: 2\n",
    "number as name": "strategy: 1\n",
    "nothing as workers": "workers:\n",
    "nested key twice": "data: {a: 1, a: 2}\n",
    "negative": "silence_s: -1\n",
    "NUL": 'data: "a\\0b"\n',
}


def recipes(random: Random) -> Wrong:
    """A recipe that is none, or says what cannot be."""
    kind = random.choice([*RECIPES, "bytes", "pipe", "device", "folder", "missing"])
    file = {"device": "/dev/zero", "folder": ".", "missing": f"{'no' * random.randint(1, 99)}.yaml"}.get(
        kind, "recipe.yaml"
    )

    def prepare() -> None:
        if kind == "pipe":
            os.mkfifo("recipe.yaml")
        elif kind == "bytes":
            Path("recipe.yaml").write_bytes(b"\xff" + random.randbytes(random.randint(1, 99)))
        elif kind in RECIPES:
            Path("recipe.yaml").write_text(RECIPES[kind], encoding="utf-8")

    given = (
        [*TRAIN, "--out", "run"]
        if "data" not in RECIPES.get(kind, "")
        else [TRAIN[0], *TRAIN[3:], "--out", "run"]
    )
    return Wrong(f"recipe: {kind}", [given[0], file, *given[1:]], prepare)


CLUSTER = """
hosts: [{name: a, count: 2}]
nic: {latency_s: 1e-4, bandwidth_bytes_per_s: 1e9}
inside: {latency_s: 1e-6, bandwidth_bytes_per_s: 1e10}
step_time: constant(mean=0.1)
"""
CLUSTERS = {
    "many hosts": CLUSTER.replace("count: 2", "count: 1000000000"),
    "no hosts": CLUSTER.replace("count: 2", "count: 0"),
    "key twice": CLUSTER + "step_time: constant(mean=0.2)\n",
    "inner key twice": CLUSTER.replace("count: 2", "count: 2, count: 3"),
    "sexagesimal": CLUSTER.replace("count: 2", "count: 1:30"),
    "unknown key": CLUSTER + "cost: 3\n",
    "step time": CLUSTER.replace("constant(mean=0.1)", "constant(mean=-1)"),
    "unknown step time": CLUSTER.replace("constant", "constnat"),
    "negative": CLUSTER.replace("1e9", "-1"),
    "no number": CLUSTER.replace("1e9", "fast"),
    "not a number": CLUSTER.replace("1e9", ".nan"),
    "without": CLUSTER.replace("step_time", "# step_time"),
    "list": "- 1\n",
    "nothing": "",
}


def clusters(random: Random) -> Wrong:
    """A cluster file that is none, or describes what cannot be."""
    kind = random.choice([*CLUSTERS, "pipe", "device", "missing", "name", "workers"])
    file = {"device": "/dev/zero", "missing": "no.yaml", "name": "no_such_cluster"}.get(kind, "cluster.yaml")

    def prepare() -> None:
        if kind == "pipe":
            os.mkfifo("cluster.yaml")
        elif file == "cluster.yaml":
            Path(file).write_text(CLUSTERS.get(kind, CLUSTER), encoding="utf-8")

    more = ["--workers", "0"] if kind == "workers" else []
    return Wrong(f"cluster: {kind}", [*SIMULATE, file, *more, "--out", "run"], prepare)


def folders(random: Random) -> Wrong:
    """An output that cannot be written, or an input that is none."""

    def files() -> None:
        Path("file").touch()
        Path("full").mkdir()
        Path("full/of.txt").touch()
        os.mkfifo("pipe")
        os.mkfifo("pipe.csv")
        Path("empty").mkdir()

    out = random.choice(
        [LONG, f"a/{LONG}", "file", "file/run", "full", "/proc/run", "/dev/null", "a\0b", "pipe"]
    )
    missing = random.choice(
        ["no/folder", LONG, "empty/", "./file", "pipe", "./pipe", "pipe.csv", "no.csv", "no*.tar", ""]
    )
    no_run = random.choice(["no", "file", "full", "pipe", LONG, "/dev/zero", ""])
    picture = random.choice(
        [f"{LONG}.png", "no/a.png", "file/a.png", "/proc/a.png", "a", "a.nothing", "full"]
    )
    verb = random.choice(["evaluate", "predict", "export", "average", "replay"])
    given: list[list[str]] = [
        [*TRAIN, "--out", out],
        ["train", "--model", "mlp", "--data", missing, "--out", "run"],
        ["train", "--resume", no_run],
        [verb, no_run] + (["x.png"] if verb == "predict" else []),
        ["augment", "flip", "--data", "digits", "--preview", picture],
        ["augment", "no_such_change", "--data", "digits"],
        [
            "profile",
            "--data",
            "digits",
            "--model",
            "mlp",
            "--out",
            random.choice([f"{LONG}.yaml", "no/p.yaml", "file", "/proc/p.yaml"]),
        ],
        [*TRAIN, "--weights", no_run or "no", "--out", "run"],
        [*TRAIN, "--teacher", no_run or "no", "--out", "run"],
        [
            *TRAIN,
            "--listen",
            "0",
            "--token-file",
            random.choice(["no", "pipe", "file", "full", LONG]),
            "--out",
            "run",
        ],
        ["run", random.choice(["no.py", "full", "pipe", LONG])],
        ["run", "--workers", random.choice(["0", "-1", "x"]), "file"],
        ["run", "file", "--workers", "0"],
        ["join", random.choice(["x", "1:2:3", "host:99999", ":", ""]), "--token-file", "file"],
        ["strategies", random.choice(["no", "", "\x1b[31m", LONG])],
    ]
    arguments = random.choice(given)
    return Wrong(f"folder: {arguments[0]}", arguments, files)


def together(random: Random) -> Wrong:
    """Values that are valid alone, and not together."""
    many = str(random.randint(3, 99))
    workers = ["--workers", "2", "--out", "run"]
    given = [
        [*TRAIN, "--strategy", f"gaia(sites={many})", *workers],
        [*TRAIN, "--strategy", f"hierarchical(groups={many})", *workers],
        [*TRAIN, "--strategy", f"mixed(replicas={many})", *workers],
        [*TRAIN, "--strategy", f"hierarchical_averaging(group={many})", *workers],
        [*TRAIN, "--freeze", "body,foo", *workers],
        [*TRAIN, "--freeze", f"norms,part{many}", *workers],
        [*TRAIN, "--min-workers", many, *workers],
        [*TRAIN, "--vacant", "1", *workers],
        [*TRAIN, "--keep-best", "--keep-checkpoints", "0", *workers],
        [*TRAIN, "--workers", str(10 ** random.randint(5, 30)), "--out", "run"],
        [*TRAIN, "--freeze-epochs", many, "--epochs", "2", *workers],
        [*TRAIN, "--cache", f"{many}XB", *workers],
        [*TRAIN, "--strategy", f"parameter_server(replicas={many})", *workers],
        [*SIMULATE, "office", "--listen", many, "--out", "run"],
        [*SIMULATE, "office", "--steps", "0", "--out", "run"],
        [*SIMULATE, "office", "--faults", f"kill(rank={many}{many})", "--out", "run"],
        ["train", f"--no-such-{many}", *TRAIN[1:]],
        [f"verb{many}"],
    ]
    arguments = random.choice(given)
    return Wrong(f"together: {' '.join(arguments[5:7])[:40]}", arguments)


KINDS = (options, recipes, clusters, folders, together)


def drawn(seed: int) -> Wrong:
    random = Random(seed)
    return random.choice(KINDS)(random)


class Started(Exception):
    """A run was started."""


def _started(*given: object, **options: object) -> None:
    raise Started


@contextlib.contextmanager
def nothing_starts() -> Iterator[None]:
    """Ends what would train, measure or join at its beginning: it was not refused."""
    beginnings = (
        "api.train.run_restarting",
        "api.simulate._played",
        "launch.script.Launcher",
        "api.joining.JoinClient",
    )
    with contextlib.ExitStack() as stack:
        for each in beginnings:
            stack.enter_context(mock.patch(f"polyrhythm.{each}", _started))
        yield


def complaint_about(wrong: Wrong) -> tuple[str, float]:
    """Make a request in a folder of its own; return what is bad about its refusal (empty: nothing), and the seconds."""
    before, out, err, status = os.getcwd(), io.StringIO(), io.StringIO(), None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            wrong.prepare()
            there = sorted(os.listdir("."))
            start_s = time.monotonic()
            with nothing_starts(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main(list(wrong.arguments))
                except SystemExit as end:
                    status = end.code
            took_s = time.monotonic() - start_s
            written = sorted(set(os.listdir(".")) - set(there))
        finally:
            os.chdir(before)
    said = err.getvalue()
    bad = []
    if status != 2:
        bad.append(f"status {status}")
    if out.getvalue():
        bad.append(f"standard output {out.getvalue()[:80]!r}")
    if said.count("\n") != 1 or not said.startswith("error: ") or "Traceback" in said:
        bad.append(f"said {said[-300:]!r}")
    if any(not letter.isprintable() for letter in said.rstrip("\n")):
        bad.append(f"said unprintably {said[:200]!r}")
    if len(said) > 2000:
        bad.append(f"said {len(said)} characters")
    if written:
        bad.append(f"wrote {written}")
    return "; ".join(bad), took_s


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        case = drawn(number)
        print(number, case.kind, [word[:60] for word in case.arguments], *complaint_about(case), sep="\n  ")
