"""Runs over real processes, played again in the simulator."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from on_processes.commands import Result, shell
from polyrhythm.api.replay import replay
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.errors import RequestError
from polyrhythm.roles.checkpointing.recording import ARRIVALS_FILE, read_recording

TRAIN = ["train", "--data", "digits", "--epochs", "2", "--json"]
RUNS = {
    "asynchronous": [
        *(
            "--strategy",
            "parameter_server(servers=2)",
            "--workers",
            "3",
            "--model",
            "mlp",
            "--batches",
            "static",
        )
    ],
    "drawn": ["--strategy", "parameter_server(servers=2)", "--workers", "3", "--model", "mlp"],
    "drawn, gossip": ["--strategy", "ad_psgd", "--workers", "3", "--model", "mlp"],
    "mixed": ["--strategy", "mixed(replicas=2)", "--workers", "4", "--model", "mlp", "--batch-size", "32"],
    "in step": [
        "--strategy",
        "synchronous",
        "--workers",
        "2",
        "--model",
        "mlp",
        "--augment",
        "crop(padding=1)",
    ],
    "two threads": [  # of the worker; the server has one
        *("--strategy", "parameter_server(servers=1, compress=power_sgd(rank=2))", "--workers", "1"),
        *("--model", "mlp(hidden=[128])", "--threads", "2", "--epochs", "1"),
    ],
    "three sums": ["--strategy", "synchronous", "--workers", "3", "--model", "mlp"],
}


@dataclass(frozen=True)
class Runs:
    """Real runs.

    Attributes:
        folder: holds their run folders.
        results: what training printed, by run.
    """

    folder: Path
    results: dict[str, Result]

    def copy(self, name: str, to: Path) -> Path:
        """Copies a run folder, without its report, so that it can be spoilt."""
        return shutil.copytree(self.folder / name, to / "run", ignore=shutil.ignore_patterns("report.html"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains."""
    folder = tmp_path_factory.mktemp("runs")
    commands = [[*TRAIN, *options, "--out", name] for name, options in RUNS.items()]
    return Runs(folder, dict(zip(RUNS, shell(folder, *commands), strict=True)))


def _change(run: Path, **values: Any) -> None:
    path = run / ARRIVALS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "name", ["asynchronous", "drawn", "drawn, gossip", "mixed", "in step", "two threads"]
)
def test_a_real_run_comes_out_the_same_bit_for_bit(runs: Runs, name: str) -> None:
    trained = runs.results[name].figures
    before = sorted(runs.folder.rglob("*"))
    threads = torch.get_num_threads()
    found = replay(runs.folder / name)
    assert found["same"] is True
    assert found["first_difference"] is None
    assert found["parameters_sha256"] == dict.fromkeys(["recorded", "replayed"], trained["parameters_sha256"])
    assert found["seconds"] > 0
    assert sorted(runs.folder.rglob("*")) == before
    assert torch.get_num_threads() == threads


def test_every_message_to_a_server_is_recorded_and_no_other(runs: Runs) -> None:
    steps = runs.results["asynchronous"].figures["steps"]
    # Of each of 3 workers a push a step, a pull at the start and after the first epoch, and its leaving; of worker 0
    # also the plan, the parameters, the final pull and its letting go. Its two requests for checkpoints are left out.
    each = 3 * (steps + 3) + 4
    recording = read_recording(runs.folder / "asynchronous")
    assert {rank: len(arrivals) for rank, arrivals in recording.ranks.items()} == {3: each, 4: each}
    assert replay(runs.folder / "asynchronous")["messages"] == 2 * each
    assert read_recording(runs.folder / "in step").messages == 0


def test_a_recording_is_small(runs: Runs) -> None:
    assert (runs.folder / "asynchronous" / ARRIVALS_FILE).stat().st_size < 4_000


def test_a_swapped_pair_is_reported_with_its_place(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("asynchronous", tmp_path)
    arrivals = read_recording(run).ranks[4]
    sources = arrivals.sources
    place = next(number for number in range(20, len(sources)) if sources[number] != sources[number + 1])
    sources[place], sources[place + 1] = sources[place + 1], sources[place]
    spoilt = json.loads((run / ARRIVALS_FILE).read_text())["ranks"] | {"4": arrivals.to_json()}
    _change(run, ranks=spoilt)
    people, machine = shell(tmp_path, ["replay", "run"], ["replay", "run", "--json"])
    assert (people.status, machine.status) == (1, 1)
    found = json.loads(machine.out)
    where = f"at server 1 (rank 4), message {place}"
    assert found["same"] is False
    assert found["first_difference"]["where"] == where
    assert found["first_difference"]["source"] == sources[place]
    assert found["first_difference"]["kind"] in ("PUSH", "PULL", "LEAVE")
    assert people.out.startswith(f"differs {where}: {found['first_difference']['text']}\n")


def test_sums_of_three_of_one_host_come_out_the_same(runs: Runs) -> None:
    found = replay(runs.folder / "three sums")
    assert found["same"] is True
    trained = runs.results["three sums"].figures
    assert found["parameters_sha256"] == dict.fromkeys(["recorded", "replayed"], trained["parameters_sha256"])


def test_sums_of_three_are_named_where_a_replay_differs(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("three sums", tmp_path)
    _change(run, parameters_sha256="0" * 64)  # as sums of several hosts might have left it
    found = replay(run)
    assert found["same"] is False
    assert found["first_difference"]["text"] == "the parameters differ, and no message does"
    assert found["first_difference"]["possible_causes"][0].startswith(
        "sums over 3 ranks, which hosts of several ranks add up host by host"
    )


def test_another_processor_is_named_where_a_replay_differs(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("asynchronous", tmp_path)
    _change(run, parameters_sha256="0" * 64, processor="Z80, 8 bits")
    found = replay(run)
    assert found["same"] is False
    assert [cause.partition(" (")[0] for cause in found["first_difference"]["possible_causes"]] == [
        "another processor"
    ]


def test_a_replay_leaves_a_run_folder_where_one_is_asked_for(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "again"
    assert replay(runs.folder / "mixed", out=out)["same"] is True
    assert {path.name for path in out.iterdir()} == {
        *("config.yaml", "data.json", "environment.json", "events.jsonl", "model.safetensors", "report.html"),
        *("predictions.csv", "pictures.json", "summary.json"),
    }
    saved, trained = (load_file(run / "model.safetensors") for run in (out, runs.folder / "mixed"))
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)
    with pytest.raises(RequestError, match="already holds another run"):
        replay(runs.folder / "mixed", out=out)


def test_the_command_says_that_it_is_the_same(runs: Runs) -> None:
    people, machine = shell(runs.folder, ["replay", "mixed"], ["replay", "mixed", "--json"])
    digest = runs.results["mixed"].figures["parameters_sha256"]
    assert people.status == 0
    assert people.out.startswith(f"the same, bit for bit: {digest}\n")
    assert machine.figures["same"] is True
    assert machine.figures["run"] == "mixed"


def test_a_resumed_run_is_refused(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("asynchronous", tmp_path)
    trained, replayed = shell(tmp_path, ["train", "--resume", "run", "--epochs", "3"], ["replay", "run"])
    assert trained.status == 0
    assert read_recording(run).resumed
    assert replayed.status == 2
    assert replayed.complaint == "run was resumed: only runs recorded from their first step can be replayed"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"outcome": "interrupted"}, "was interrupted: the times of the stops are not recorded"),
        ({"workers": [0, 1]}, "is damaged (workers and servers are not all ranks, once each)"),
        (
            {"ranks": {"3": {"sources": "AAAA", "checks": "AAAA"}}},
            "is damaged (a list of arrivals is damaged",
        ),
        ({"ranks": {"9": Arrivals().to_json()}}, "is damaged (there are ranks 0 to 4"),
        (
            {"job": {"strategy": "synchronous"}},
            "was recorded with strategy synchronous, its config.yaml has",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    runs: Runs, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    run = runs.copy("asynchronous", tmp_path)
    _change(run, **values)
    with pytest.raises(RequestError) as refused:
        replay(run)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_no_recording_is_refused_in_one_line(runs: Runs, tmp_path: Path) -> None:
    copies = {name: runs.copy("in step", tmp_path / name) for name in ("cut", "empty", "none", "no run")}
    cut = copies["cut"] / ARRIVALS_FILE
    cut.write_text(cut.read_text()[:100])
    (copies["empty"] / ARRIVALS_FILE).write_text("{}")
    (copies["none"] / ARRIVALS_FILE).unlink()
    (copies["no run"] / "config.yaml").unlink()
    refused = shell(tmp_path, *(["replay", f"{name}/run"] for name in copies))
    for result, words in zip(
        refused,
        [
            f"cut/run/{ARRIVALS_FILE} is damaged (",
            f"empty/run/{ARRIVALS_FILE} is damaged (it lacks 'workers')",
            f"none/run holds no {ARRIVALS_FILE}",
            "no run/run is not a run folder",
        ],
        strict=True,
    ):
        assert result.status == 2
        assert result.complaint.startswith(words)
