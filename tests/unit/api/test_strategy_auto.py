"""`--strategy auto`: what it takes where, and what it says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyrhythm.api import rehearsal as deciding
from polyrhythm.api.rehearsal import Auto
from polyrhythm.api.train import train
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.events import Notice
from polyrhythm.reporting.event_log import read_events
from polyrhythm.simulation.cluster import Cluster, open_cluster

JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "workers": 4}


def cluster(link: str, tmp_path: Path) -> Cluster:
    path = tmp_path / "C.yaml"
    path.write_text(
        "name: c\nhosts: [{name: h, count: 4, cores: 1, workers: 1}]\n"
        f"nic: {{latency_s: 1.0e-5, bandwidth_bytes_per_s: {link}}}\n"
        "inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e+10}\n"
        "step_time: constant(seconds=0.01)\n"
    )
    return open_cluster(path)


def test_where_links_are_fast_one_large_batch_is_taken(tmp_path: Path) -> None:
    found = Auto().chosen(cluster("1.0e+10", tmp_path), configure({}, JOB))
    assert found.candidate.strategy == "synchronous"
    assert "synchronous" in found.reason


def test_where_links_are_slow_rare_exchanges_outweigh_what_they_cost(tmp_path: Path) -> None:
    where = cluster("2.0e+5", tmp_path)
    found = Auto().chosen(where, configure({}, JOB))
    assert found.candidate.strategy == "local_sgd(steps=16)"
    assert found.reason.startswith("local_sgd(steps=16): ")
    assert " times those of " in found.reason
    safe = Auto(margin=1000).chosen(where, configure({}, JOB))
    assert safe.candidate.strategy != found.candidate.strategy
    assert "may cost (auto(margin=1000))" in safe.reason


def test_averaged_models_need_a_smaller_lead_than_stale_gradients() -> None:
    """On uneven hosts both have a lead of 1.15 to 1.22."""
    where = open_cluster("office")
    assert Auto().chosen(where, configure({}, JOB)).candidate.strategy == "ad_psgd"
    assert Auto(margin=2.5).chosen(where, configure({}, JOB)).candidate.strategy == "synchronous"


def test_options_of_the_run_are_regarded() -> None:
    where = open_cluster("office")
    found = Auto().chosen(where, configure({}, {**JOB, "balance": "measured"}))  # ad_psgd refuses it
    assert found.candidate.strategy == "synchronous"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("auto(host=3)", "key of auto"),
        ("auto(margin=0.5)", "margin must be at least 1"),
        ("auto(", "cannot read"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        Auto.parse(text)
    assert Auto.parse("synchronous") is None


def test_a_run_says_what_was_taken_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's recipe has the choice, so it is made once."""
    monkeypatch.setattr(deciding, "this_machine", lambda config, start_method: cluster("1.0e+10", tmp_path))
    out = tmp_path / "run"
    options: dict[str, Any] = {**JOB, "workers": 1, "epochs": 1, "start_method": "fork"}
    run = train(**options, strategy="auto", out=out)
    assert run is not None
    assert run.figures["strategy"] == "synchronous"
    (said,) = [
        event.text
        for event in read_events(out / "events.jsonl")
        if isinstance(event, Notice) and event.text.startswith("strategy auto")
    ]
    assert said.startswith("strategy auto takes synchronous: ")
    assert "strategy: synchronous\n" in (out / "config.yaml").read_text()
    page = (out / "report.html").read_text()
    assert "Prediction and run" in page
    assert "A dry run in virtual time on c, " in page
    with pytest.raises(RequestError, match="decides at a run's start"):
        train(resume=out, strategy="auto", start_method="fork")


def test_this_machine_has_a_place_for_every_worker(tmp_path: Path) -> None:
    where = deciding.this_machine(configure({}, {**JOB, "workers": 64}), "fork")
    (host,) = where.hosts
    assert host.places == 64
    assert host.speed == pytest.approx(host.cores / 64)
    assert where.step_of is not None
