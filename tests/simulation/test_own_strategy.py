"""The strategy that docs/tutorials/own-strategy.md shows keeps what the page promises."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polyrhythm
from conformance.jobs import make_job, resumed, simulated, stop_at
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.specs import IMPORTS
from polyrhythm.strategies.strategy import Strategy
from simulation.trying import trial

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-strategy.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the page's example; gives its names."""
    block = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {"__name__": "own", "out": tmp_path_factory.mktemp("own") / "run"}
    exec(block, found)
    return found


@pytest.fixture(scope="module")
def own(page: dict[str, Any]) -> Strategy:
    made: Strategy = page["EveryOther"]()
    return made


def test_it_sends_half_of_what_synchronous_does(page: dict[str, Any], tmp_path: Path) -> None:
    figures = page["run"].figures
    job: Any = {"data": "digits", "model": "mlp", "epochs": 1, "workers": 2}
    every = polyrhythm.simulate(
        cluster="office", strategy="synchronous", out=tmp_path / "every", **job
    ).figures
    assert 0.4 < figures["bytes_sent_per_step"] / every["bytes_sent_per_step"] < 0.6
    assert figures["test_top1"] > 0.2


def test_it_survives_failed_workers(own: Strategy) -> None:
    assert try_seeds(trial(own, workers=4, steps=12), range(30)).failures == ()


def job_of(own: Strategy, folder: Path | None = None) -> Job:
    job = make_job("local_sgd(steps=2)", 3, folder=folder, optimizer="sgd(lr=0.05, momentum=0.9)")
    return replace(job, strategy=own)


@pytest.mark.parametrize("stop_s", [0.02, 0.047, 0.08])
def test_a_resumed_run_has_the_same_bits(own: Strategy, stop_s: float, tmp_path: Path) -> None:
    whole = simulated(job_of(own))
    job = job_of(own, tmp_path)
    simulated(job, stop_at(stop_s))
    assert simulated(resumed(job)).sha256 == whole.sha256


@pytest.mark.parametrize("workers", [2, 5])
def test_it_continues_with_another_number_of_workers(own: Strategy, workers: int, tmp_path: Path) -> None:
    job = job_of(own, tmp_path)
    simulated(job, stop_at(0.047))
    other = simulated(resumed(replace(job, workers=workers)))
    assert other.events[-1].outcome == "done"
    assert "the mean of 3 models" in str(other.events)


def test_a_class_of_the_former_contract_is_refused_with_the_way_out() -> None:
    said = r"OverlapsBackward is no longer needed: .* \(docs/tutorials/own-strategy"
    with pytest.raises(ImportError, match=said):
        from polyrhythm.strategies.worker_part import OverlapsBackward  # noqa: F401


def test_verbs_build_it_from_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in a module of one's own: resumed, compared and planned by name, also in other processes."""
    block = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("\nrun = ")[0]
    (tmp_path / "every_other.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("every_other")
    own, job = module.EveryOther(), {"cluster": "office", "data": "digits", "model": "mlp"}
    compared = polyrhythm.compare(
        strategies=[own, "synchronous"], workers=[2], epochs=1, out=tmp_path / "compared", **job
    )
    assert [row.strategy for row in compared.comparison.rows] == ["every_other.EveryOther", "synchronous"]
    assert not compared.comparison.refused
    planned = polyrhythm.plan(
        target="top1=0.3", strategies=[own], workers=[2], out=tmp_path / "planned", **job
    )
    assert [choice.candidate.strategy for choice in planned.choices] == ["every_other.EveryOther"]
    [folder] = (run.folder for row in compared.comparison.rows[:1] for run in row.runs)
    monkeypatch.delitem(sys.modules, "every_other")
    with pytest.raises(RequestError, match="set POLYRHYTHM_IMPORT=every_other"):
        polyrhythm.why(folder)
    monkeypatch.setenv(IMPORTS, "every_other")
    assert polyrhythm.why(folder).images_per_s > 0
