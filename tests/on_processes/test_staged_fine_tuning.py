"""Thawing by stages, by strategies on several workers, from the weights of an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import polyrhythm
from polyrhythm.api import fine_tuning
from polyrhythm.reporting.event_log import read_events

NETWORK = "mlp(hidden=[12, 48])"


@pytest.fixture
def untaught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network that has learned next to nothing, so that its features are poor."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = polyrhythm.train(
        data="digits",
        model=NETWORK,
        workers=1,
        epochs=1,
        optimizer="sgd(lr=1e-6)",
        out=tmp_path / "untaught",
        start_method="fork",
    )
    assert run is not None
    return run.folder


@pytest.mark.parametrize("strategy", ["synchronous", "parameter_server"])
def test_thawing_that_helps_is_kept(
    strategy: str, untaught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fine_tuning, "PATIENT_S", 1e6)
    monkeypatch.setattr(fine_tuning, "_RATE_DECAY", 1.0)
    options: dict[str, Any] = {"data": "digits", "model": NETWORK, "weights": str(untaught)}
    run = polyrhythm.train(
        fine_tuning="staged",
        epochs=8,
        strategy=strategy,
        workers=2,
        out=tmp_path / "run",
        start_method="fork",
        **options,
    )
    assert run is not None
    assert run.outcome == "done"
    facts = run.figures["fine_tuning"]
    assert facts["kept"] == "everything"
    assert facts["rounds"][-1]["held_out_top1"] > facts["head_held_out_top1"]
    assert run.figures["test_top1"] > facts["head_test_top1"]
    assert run.figures["steps"] > 0
    assert polyrhythm.evaluate(run.folder)["test_top1"] == run.figures["test_top1"]
    assert (run.folder / "stages" / "2-part" / "report.html").is_file()
    texts = [str(getattr(event, "text", "")) for event in read_events(run.folder / "events.jsonl")]
    assert any("held-out top-1" in text and "everything thawed" in text for text in texts)
