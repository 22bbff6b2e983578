"""What `polyrhythm.train` refuses in Python, and what it leaves when it does."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

import polyrhythm
from polyrhythm.api import train as api_train
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.joining.join_server import Admission
from polyrhythm.partition.outlook import seconds_of_pieces
from polyrhythm.roles.job import Job


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"workers": True}, "workers should be a whole number (given True)"),
        ({"workers": 2.0}, "workers should be a whole number (given 2.0)"),
        ({"workers": "two"}, "workers should be a whole number (given 'two')"),
        ({"batch_size": 0}, "batch_size should be greater than or equal to 1 (given 0)"),
        ({"wrokers": 1}, "unknown key of the run 'wrokers': did you mean workers?"),
        ({"data": 3}, "data is a int: give a (train, test) pair"),
        ({"data": (1, 2)}, "a part of data is a int"),
        ({"strategy": 3}, "strategy: cannot read '3'"),
        ({"model": 3}, "cannot read '3'"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], complaint: str, empty: Path) -> None:
    with pytest.raises(polyrhythm.RequestError) as refusal:
        polyrhythm.train(**{"data": "digits", "model": "mlp", **values})
    assert complaint in str(refusal.value)
    assert not list(empty.iterdir())


def test_nothing_stays_of_a_run_that_a_rank_refused_before_it_started(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise polyrhythm.RequestError("it is wrong")

    monkeypatch.setattr(api_train, "run_local", refuse)
    with pytest.raises(polyrhythm.RequestError, match="it is wrong"):
        polyrhythm.train(data="digits", model="mlp")
    assert not list(empty.iterdir())


def test_a_failure_before_the_start_is_not_hidden_by_the_report(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunError("worker 0 (rank 0) was killed by SIGKILL")

    monkeypatch.setattr(api_train, "run_local", fail)
    with pytest.raises(RunError, match="was killed by SIGKILL"):
        polyrhythm.train(data="digits", model="mlp", out="run")
    assert (empty / "run" / "config.yaml").is_file()


def test_a_rank_of_torchrun_that_comes_late_finds_the_folder_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("the leader's\n")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    played: list[Job] = []

    def play(job: Job, emit: object, threads: object, admission: object, gather_s: float) -> bool:
        played.append(job)
        return False

    monkeypatch.setattr("polyrhythm.launch.torchrun.started_rank.run_under_torchrun", play)
    assert polyrhythm.train(data="digits", model="mlp", out=tmp_path) is None
    assert [job.checkpointing.folder for job in played] == [tmp_path]


def test_places_that_are_kept_come_on_top_of_torchruns_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POLYRHYTHM_TOKEN", "the token of this test")
    played: list[tuple[Job, Admission]] = []

    def play(job: Job, emit: object, threads: object, admission: Admission, gather_s: float) -> bool:
        played.append((job, admission))
        return False

    monkeypatch.setattr("polyrhythm.launch.torchrun.started_rank.run_under_torchrun", play)
    options = {"data": "digits", "strategy": "parameter_server", "vacant": 2, "listen": "127.0.0.1:4711"}
    assert polyrhythm.train(**options, out=tmp_path / "run") is None
    ((job, admission),) = played
    assert (job.workers, job.fault_tolerance.vacant) == (4, 2)  # two of three processes work
    assert (str(admission.address), admission.token()) == ("127.0.0.1:4711", "the token of this test")
    assert admission.entrance is None
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RequestError, match="torchrun's processes leave 4 workers, not 3: omit --workers"):
        polyrhythm.train(**options, workers=3, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ("", r"script\.py, line 2: .* below an `if __name__"),
        ('if __name__ == "__main__": ', "nothing of the kind"),
        ('if "__main__" == __name__ and True:\n    ', "nothing of the kind"),
        ("if True: ", r"script\.py, line 2: "),
    ],
)
def test_a_script_that_workers_would_run_again_is_named_before_anything_starts(
    guard: str, words: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f'import polyrhythm\n{guard}polyrhythm.train(data="digits", model="nothing of the kind")\n'
    )
    with pytest.raises(RequestError, match=words):
        runpy.run_path(str(script), run_name="__main__")


def test_copies_of_stages_follow_measured_times_and_stay_when_the_run_is_resumed(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers of as many operations, here the first takes three times as long."""
    asked: list[tuple[object, ...]] = []

    def measured(_method: str, function: Callable[..., object], *arguments: object) -> list[float]:
        asked.append((function, *arguments[1:]))
        return [3.0, *[0.0] * 4, 1.0]

    def fail(*_: object, **__: object) -> None:
        raise RunError("worker 0 (rank 0) was killed by SIGKILL")

    monkeypatch.setattr(api_train, "call_in_process", measured)
    monkeypatch.setattr(api_train, "run_local", fail)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    options = {"data": "digits", "model": model, "workers": 4, "batch_size": 6}
    spec = "pipeline(microbatches=12, replicas=auto, balance=auto)"
    with pytest.raises(RunError):
        polyrhythm.train(**options, strategy=spec, out="run")
    assert asked == [(seconds_of_pieces, (1, 8, 8), 2, "cpu")]
    chosen = "pipeline(microbatches=12, balance=auto, replicas=[3, 1])"
    assert yaml.safe_load((empty / "run" / "config.yaml").read_text())["strategy"] == chosen
    with pytest.raises(RunError):
        polyrhythm.train(**options, strategy=spec, out="run", resume="auto")
    assert len(asked) == 1
    assert yaml.safe_load((empty / "run" / "config.yaml").read_text())["strategy"] == chosen
