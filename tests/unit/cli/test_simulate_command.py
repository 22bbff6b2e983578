"""`polyrhythm simulate`, from the command line to the run folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.cli.main import _status
from polyrhythm.simulation.cluster import open_cluster

TINY = ("--data", "digits", "--model", "mlp", "--epochs", "1", "--batch-size", "128")
Refusal = Callable[..., str]

WRONG = {
    "no cluster": ([], "Missing option '--cluster' (see polyrhythm simulate --help)"),
    "cluster": (["--cluster", "ofice"], "unknown cluster 'ofice': did you mean office?"),
    "file": (["--cluster", "no.yaml"], "cannot read the cluster file no.yaml: No such file or directory"),
    "workers": (
        ["--cluster", "office", "--workers", "5"],
        "5 workers do not fit on cluster office: it has 4 places for workers on 4 hosts",
    ),
    "step time": (
        ["--cluster", "office", "--step-time", "gauss(mean=1)"],
        "unknown step time 'gauss': there are constant, empirical, exponential",
    ),
    "strategy": (["--cluster", "office", "--strategy", "sync"], "unknown strategy 'sync'"),
    "port": (["--cluster", "office", "--port", "1"], "leave --port out"),
    "gradients": (["--cluster", "office", "--gradients", "fake"], "unknown gradients 'fake'"),
    "steps of real training": (["--cluster", "office", "--steps", "3"], "--steps goes with --gradients none"),
    "no step": (
        ["--cluster", "office", "--gradients", "none", "--steps", "0"],
        "steps must be at least 1 (given 0)",
    ),
    "steps without end": (
        ["--cluster", "office", "--gradients", "none", "--steps", "1" + 22 * "0"],
        "steps must be at most 1,000,000,000 (given 10000000000000000000000), which takes hours with one worker",
    ),
    "workers without number": (
        ["--cluster", "office", "--workers", "1000000"],
        "workers should be less than or equal to 100000 (given ",
    ),
    "steps and epochs": (
        ["--cluster", "office", "--gradients", "none", "--steps", "3"],
        "--steps and --epochs both set the length: give one of them",
    ),
    "caches without gradients": (
        ["--cluster", "office", "--gradients", "none", "--cache", "none"],
        "--gradients none learns nothing, so --cache means nothing: leave it out",
    ),
    "average without gradients": (
        ["--cluster", "office", "--gradients", "none", "--weight-average", "0.5"],
        "so --weight-average means nothing",
    ),
    "workers without gradients": (
        ["--cluster", "office", "--gradients", "none", "--workers", "5000"],
        "5000 workers cannot share 1438 training images: ask for fewer workers, or for --steps of full batches",
    ),
    "places without gradients": (
        ["--cluster", "office", "--gradients", "none", "--workers", "5"],
        "5 workers do not fit on cluster office: it has 4 places",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_one_line(refused: Refusal, arguments: list[str], message: str) -> None:
    assert message in refused("simulate", *TINY, *arguments)


def _simulate(out: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status = _status(["simulate", *TINY, "--out", str(out), "--json", *arguments])
    printed, said = capfd.readouterr()
    assert status == 0, said
    read: dict[str, Any] = json.loads(printed)
    return read


def test_it_leaves_what_train_leaves_and_a_timeline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = ("--cluster", "ut_austin", "--step-time", "constant(seconds=2)", "--workers", "3")
    figures = _simulate(folder, capfd, *arguments)
    assert {path.name for path in folder.iterdir()} >= {
        "checkpoints",
        "cluster.yaml",
        "config.yaml",
        "environment.json",
        "events.jsonl",
        "model.safetensors",
        "report.html",
        "summary.json",
        "trace.json",
    }
    assert figures["steps"] == 4  # 1438 images, 3 times 128 a step
    assert 8.0 < figures["seconds"] < 8.5  # virtual ones
    assert figures["images_per_s"] == pytest.approx(1438 / 8, rel=0.05)
    assert figures["cluster"] == "ut_austin"
    assert figures["hosts"] == 3
    assert figures["price"] == pytest.approx(3 * 0.19 * figures["seconds"] / 3600, rel=1e-12)
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    told = {"held_back": figures["held_back"], "stragglers": {}, "restarts": 0, "updates_lost": 0}
    told |= {"images_unreadable": 0}
    told["sustained_images_per_s"] = pytest.approx(1438 / 8, rel=0.05)  # workers that are equally fast
    told["best"] = {"epoch": 1, "test_top1": figures["test_top1"]}
    assert {**last["result"], **told} == figures
    assert figures["held_back"]["cause"] == "compute"
    cluster = open_cluster(folder / "cluster.yaml")
    assert str(cluster.step_time) == "constant(seconds=2.0)"
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    computed = {
        rank: sum(event["dur"] for event in events if event["name"] == "compute" and event["tid"] == rank)
        for rank in range(3)
    }
    assert computed == pytest.approx({0: 8e6, 1: 8e6, 2: 8e6}, rel=1e-9)


def test_the_same_seed_gives_the_same_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("--cluster", "spot", "--strategy", "parameter_server(servers=2)", "--workers", "4")
    first, second = (_simulate(tmp_path / name, capfd, *arguments) for name in ("one", "two"))
    assert {**first, "run": ""} == {**second, "run": ""}
    traces = [(tmp_path / name / "trace.json").read_bytes() for name in ("one", "two")]
    assert traces[0] == traces[1]
    other = _simulate(tmp_path / "three", capfd, *arguments, "--seed", "1")
    assert other["seconds"] != first["seconds"]


MANY = """
hosts:
  - {name: box, count: 10000, cores: 8, price_per_hour: 0.36}
nic: {latency_s: 0.0, bandwidth_bytes_per_s: 1.0e+9}
inside: {latency_s: 0.0, bandwidth_bytes_per_s: 1.0e+10}
step_time: constant(seconds=0.5)
"""


def test_a_dry_run_has_the_same_figures_but_for_what_is_learned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    real = _simulate(tmp_path / "real", capfd, "--cluster", "ut_austin", "--workers", "3")
    none = _simulate(
        tmp_path / "none", capfd, "--cluster", "ut_austin", "--workers", "3", "--gradients", "none"
    )
    assert (real["gradients"], none["gradients"]) == ("real", "none")
    learned = {"train_loss", "test_loss", "test_top1", "test_top5", "parameters_sha256"}
    added = {"per_class", "workers_lost", "workers_joined", "images_not_seen"}  # of those who learn
    added |= {"test_images", "test_top1_interval", "confusion", "best"}
    assert set(none) >= set(real) - added
    assert {key for key, value in none.items() if value is None} == learned
    for key in ("strategy", "data", "model", "workers", "servers", "steps", "epochs"):
        assert none[key] == real[key], key
    # the two numbers that travel with the gradients are scaled too: 2 of 1536
    assert none["bytes_sent_per_step"] == pytest.approx(real["bytes_sent_per_step"], rel=2e-3)
    assert none["seconds"] == pytest.approx(real["seconds"], rel=1e-3)
    assert none["waiting_share"] == pytest.approx(real["waiting_share"], abs=1e-3)


PAIRS = """
hosts:
  - {name: pair, count: 2, cores: 4, accelerators: 2, workers: 2}
  - {name: server, count: 1, cores: 4}
nic: {latency_s: 0.0, bandwidth_bytes_per_s: 1.0e+9}
inside: {latency_s: 0.0, bandwidth_bytes_per_s: 1.0e+10}
step_time: constant(seconds=0.5)
"""


@pytest.mark.parametrize(
    ("spec", "all_bytes", "between"),
    [
        # Of all-reduced slices, two of three others are on the other host.
        ("synchronous(collective=direct)", 2 * 3 / 4, 2 * 2 / 4),
        # A pair sends one gradient to the server and receives one answer; inside, it averages and hands the answer on.
        ("mixed(replicas=2, servers=1, placement=dedicated)", 1 + 1 + 1 / 2, 1),
        ("parameter_server(servers=1, placement=dedicated)", 2, 2),
    ],
)
def test_bytes_between_hosts_are_counted_apart_from_those_inside(
    spec: str, all_bytes: float, between: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.yaml").write_text(PAIRS)
    arguments = ["--cluster", str(tmp_path / "pairs.yaml"), "--strategy", spec, "--workers", "4"]
    found = _simulate(tmp_path / "run", capfd, *arguments)
    model = found["bytes_sent_per_step"] / all_bytes
    assert found["bytes_between_hosts_per_step"] == pytest.approx(between * model, rel=5e-3)


def test_a_dry_run_of_many_leaves_a_bounded_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "many.yaml").write_text(MANY)
    folder = tmp_path / "run"
    arguments = ["--cluster", str(tmp_path / "many.yaml"), "--gradients", "none", "--workers", "200"]
    arguments += ["--strategy", "parameter_server(servers=2)", "--steps", "3", "--out", str(folder), "--json"]
    assert _status(["simulate", "--data", "digits", "--model", "lenet5", *arguments]) == 0
    printed, said = capfd.readouterr()
    figures = json.loads(printed)
    assert figures["epochs"] == round(3 * 200 * 64 / 1438, 3)
    assert figures["steps"] == 3
    assert figures["hosts"] == 200
    assert figures["price"] == pytest.approx(figures["seconds"] * 200 * 1e-4, rel=1e-12)
    assert sum(figures["staleness"]["histogram"].values()) == 3 * 200 * 2
    assert "notice: trace.json shows the first 64 of 200 workers and 2 of 2 servers" in said
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {*range(64), 200, 201}
    assert {path.name for path in folder.iterdir()} == {
        "cluster.yaml",
        "config.yaml",
        "environment.json",
        "events.jsonl",
        "report.html",
        "summary.json",
        "trace.json",
    }
    report = (folder / "report.html").read_text().split("<footer>")[0]
    assert "Training loss" not in report
    assert "Test top-1" not in report
    assert "<td>nan" not in report
    assert "The first 64 of 200 workers" in report
    assert f"{folder}/cluster.yaml --gradients none --steps 3" in report


def test_people_are_told_where_it_ran(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _status(["simulate", *TINY, "--out", str(tmp_path / "run"), "--cluster", "office"]) == 0
    printed, progress = capfd.readouterr()
    tests = [line for line in progress.splitlines() if " done  test " in line]
    assert tests
    assert all(line.endswith("s (virtual)") for line in tests)
    assert "done after" not in progress, "the result follows, with the same figures"
    assert re.search(r"trained in  \d[\d.]* m?s of virtual time at", printed)
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
    assert "cluster     office, 2 hosts" in printed
    assert "trace.json" in printed
