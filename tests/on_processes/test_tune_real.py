"""Searches of real runs: populations that copy checkpoints, and processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import polyrhythm
from polyrhythm.api import tune as tuning
from polyrhythm.api.run_process import Judge, RunProcess
from polyrhythm.api.tune import carry_out, plan
from polyrhythm.events import Evaluated
from polyrhythm.reporting.event_log import read_events

JOB = {"data": "digits", "model": "mlp", "workers": 2}


@pytest.mark.parametrize(
    "strategy", ["synchronous", "parameter_server(servers=1, consistency=synchronous)", "local_sgd(steps=4)"]
)
def test_a_run_resumed_with_another_rate_is_the_run_whose_rate_changes_there(
    strategy: str, tmp_path: Path
) -> None:
    common = {**JOB, "strategy": strategy}
    rates = {"optimizer": "sgd(lr=0.1)", "schedule": "step(at=[0.5], gamma=0.5)"}
    polyrhythm.train(out=tmp_path / "whole", start_method="fork", epochs=2, **rates, **common)
    first = {"optimizer": "sgd(lr=0.1)", "schedule": "constant"}
    polyrhythm.train(out=tmp_path / "parts", start_method="fork", epochs=1, **first, **common)
    polyrhythm.train(resume=tmp_path / "parts", start_method="fork", epochs=2, optimizer="sgd(lr=0.05)")
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_population_copies_checkpoints_and_its_lineage_can_be_replayed(tmp_path: Path) -> None:
    space = {"lr": {"from": 0.001, "to": 0.5, "log": True}}
    what = plan(space, method="pbt", budget="99 trials", population=2, options={**JOB, "epochs": 2})
    done = carry_out(what, out=tmp_path / "search", jobs=1)
    trials = {trial.folder: trial for trial in done.search.trials}
    assert all(trial.state == "done" for trial in trials.values())
    copied = [trial for trial in trials.values() if trial.parent and trial.parent[:9] != trial.folder[:9]]
    assert copied
    last = copied[-1]
    lineage = [last]
    while lineage[0].parent is not None:
        lineage.insert(0, trials[lineage[0].parent])
    folder = tmp_path / "replayed"
    for interval, trial in enumerate(lineage, 1):
        told = {
            "optimizer": f"sgd(lr={trial.parameters['lr']!r})",
            "epochs": interval,
            "schedule": "constant",
        }
        if interval == 1:
            polyrhythm.train(out=folder, start_method="fork", seed=0, **told, **JOB)
        else:
            polyrhythm.train(resume=folder, start_method="fork", **told)
    found = load_file(tmp_path / "search" / last.folder / "model.safetensors")
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_a_run_stops_at_its_next_test_without_a_word_when_whoever_planned_it_is_gone(tmp_path: Path) -> None:
    task = {"folder": str(tmp_path / "run"), "options": {**JOB, "workers": 1, "epochs": 99}, "simulation": {}}
    process = subprocess.Popen(
        [sys.executable, "-c", "from polyrhythm.api.run_server import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(json.dumps({**task, "judged": True}) + "\n")
    process.stdin.close()
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read()
    assert process.wait(60) == 0
    assert "Traceback" not in said
    assert "could not write" not in said
    epochs = [
        event.epoch
        for event in read_events(tmp_path / "run" / "events.jsonl")
        if isinstance(event, Evaluated)
    ]
    assert len(epochs) < 99


def test_trials_whose_process_is_killed_end_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(RunProcess):
        """Dies after the first test of its first run."""

        died = False

        def make(self, task: dict[str, object], judge: Judge | None = None) -> dict[str, object]:  # type: ignore[override]
            def kill(epoch: int, tested: object) -> bool:
                if not self.died:
                    self.died = True
                    os.kill(self.pid, signal.SIGKILL)
                return True

            return super().make(task, kill)

    monkeypatch.setattr(tuning, "RunProcess", Killed)
    what = plan({"lr": [0.05, 0.01]}, method="grid", budget="9 trials", options={**JOB, "epochs": 2})
    done = carry_out(what, out=tmp_path / "search", jobs=1)
    ended = [(trial.state, trial.folder) for trial in done.search.trials]
    assert ended == [("done", "trial-0000"), ("done", "trial-0001")]
    polyrhythm.train(
        out=tmp_path / "alone", start_method="fork", optimizer="sgd(lr=0.05)", epochs=2, seed=0, **JOB
    )
    killed, alone = (
        load_file(tmp_path / name / "model.safetensors") for name in ("search/trial-0000", "alone")
    )
    assert all(torch.equal(killed[name], alone[name]) for name in killed)
