"""Whether compression pays: the arithmetic, what each family moves, and where it is said."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.jobs import strategy
from polyrhythm.api.simulate import simulate
from polyrhythm.api.why import why
from polyrhythm.compression import payoff
from polyrhythm.compression.compressor import COMPRESSORS
from polyrhythm.compression.layout import Layout
from polyrhythm.compression.payoff import Payoff, coding_seconds
from polyrhythm.specs import build, choices
from polyrhythm.strategies.compressing import Compressible, payoff_of
from unit.simulation.clusters import cluster

SHAPES = [(300, 200), (200,), (10, 200)]
WHOLE = 4 * (300 * 200 + 200 + 10 * 200)


def test_a_line_says_what_is_gained_and_below_which_link() -> None:
    found = Payoff("top_k(density=0.01)", 0.041, 1.2e6, 0.06e6, 1.2e6 * 0.95 / 0.009)
    assert found.saved_s == pytest.approx(0.009)
    assert found.gain_s == pytest.approx(0.009 - 0.041)
    assert found.pays_below_bytes_per_s == pytest.approx(1.14e6 / 0.041)
    assert found.text == (
        "top_k(density=0.01): 41 ms to compress saves 9 ms on this link: slower by 32 ms; it pays below 222 Mb/s"
    )
    slow = Payoff("int8", 0.001, 2e6, 1e6, 1e6)
    assert (
        slow.text
        == "int8: 1 ms to compress saves 1,000 ms on this link: faster by 999 ms; it pays below 8 Gb/s"
    )
    none = Payoff("int8", 0.001, 2e6, 1e6, 1e18)
    assert none.text.startswith(
        "int8: 1 ms to compress saves nothing that can be measured on this link: slower by 1 ms"
    )
    at_the_limit = Payoff("int8", 0.001, 2e6, 1e6, slow.pays_below_bytes_per_s)
    assert at_the_limit.gain_s == pytest.approx(0, abs=1e-15)


def test_what_sends_more_pays_on_no_link() -> None:
    found = Payoff("top_k(density=0.5)", 0.01, 1e6, 7e6, 1e6)
    assert found.pays_below_bytes_per_s == 0
    assert (
        found.text == "top_k(density=0.5): sends 7 times the bytes of whole vectors here: it pays on no link"
    )


@pytest.mark.parametrize(
    ("spec", "workers", "whole", "sent"),
    [
        ("synchronous(compress=top_k)", 4, 1.5, 3),  # gathered: each sends its own to three others
        ("synchronous(compress=int8)", 4, 1.5, 1.5),  # slices there and back
        ("synchronous(compress=int8)", 2, 1, 1),
        ("synchronous(compress=random_k)", 4, 1.5, 1.5),  # added up as they travel
        ("synchronous(compress=power_sgd)", 4, 1.5, 1.5),
        ("local_sgd(compress=top_k)", 4, 1.5, 3),
        ("parameter_server(compress=top_k)", 4, 8, 8),  # a server's port has all workers'
        ("parameter_server(servers=2, compress=top_k)", 4, 4, 4),
        ("parameter_server(servers=4, compress=top_k)", 2, 2, 2),  # a worker's port has its own
    ],
)
def test_the_busiest_port_carries_what_the_ways_of_a_family_send(
    spec: str, workers: int, whole: float, sent: float
) -> None:
    built = strategy(spec)
    assert isinstance(built, Compressible)
    found = built.exchange(workers, 100.0, 1.0)
    assert (found.whole_bytes, found.sent_bytes) == (pytest.approx(100 * whole), pytest.approx(sent))
    assert found.encodings >= 1
    assert found.decodings >= 1


@pytest.mark.parametrize(("name", "workers"), list(product(choices(COMPRESSORS), [2, 4])), ids=str)
def test_bytes_are_those_of_the_shapes_or_nothing_is_said(name: str, workers: int) -> None:
    made = build("compressor", name, COMPRESSORS)
    built = strategy(f"synchronous(compress={name})")
    found = payoff_of(built, SHAPES, torch.float32, workers, 1e8)
    if made.by_value:
        assert found is None
        return
    assert found is not None
    payload = Layout.of(SHAPES, made).nbytes(made, torch.float32)
    assert found.whole_bytes == pytest.approx(2 * (workers - 1) / workers * WHOLE)
    assert payload is not None
    assert found.sent_bytes in (
        pytest.approx((workers - 1) * payload),
        pytest.approx(2 * (workers - 1) / workers * payload),
    )
    assert found.compress_s > 0


def test_nothing_is_said_where_nothing_is_compressed_or_travels() -> None:
    assert payoff_of(strategy("synchronous"), SHAPES, torch.float32, 4, 1e8) is None
    assert payoff_of(strategy("d_psgd"), SHAPES, torch.float32, 4, 1e8) is None
    assert payoff_of(strategy("synchronous(compress=int8)"), SHAPES, torch.float32, 1, 1e8) is None
    served = payoff_of(strategy("parameter_server(compress=int8)"), SHAPES, torch.float32, 1, 1e8)
    assert served is not None


def test_of_a_large_model_a_part_is_measured_and_the_rest_counts_in_proportion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(payoff, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(payoff, "_MOST_NUMBERS", 1000)
    made = build("compressor", "int8", COMPRESSORS)
    layout = Layout.of([(100, 100), (100, 100)], made)
    assert coding_seconds(made, layout, torch.float32) == (20.0, 20.0)  # 10 rows of the first of 200


def said(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if "to compress" in event.get("text", "")]


JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "workers": 4, "batch_size": 32, "epochs": 1}


@pytest.mark.parametrize("gradients", ["real", "none"])
def test_a_simulation_says_it_of_its_cluster(gradients: str, tmp_path: Path) -> None:
    where = cluster({"count": 4}, step_time="constant(seconds=0.01)")
    simulate(
        cluster=where,
        strategy="synchronous",
        compress="int8",
        gradients=gradients,
        out=tmp_path / "run",
        **JOB,
    )
    [text] = said(tmp_path / "run")
    assert re.fullmatch(
        r"int8: .* ms to compress saves (.* ms|nothing that can be measured) on this link: (slower|faster) by .* ms; "
        r"it pays below .* [MG]b/s; "
        "compressing is measured on this machine, and takes no simulated time",
        text,
    )


def test_why_tries_the_run_without_compression(tmp_path: Path) -> None:
    """Over a link of 1 Mb/s to send everything takes longer, and over 100 Gb/s compressing costs more than it saves."""
    gains = {}
    for bandwidth in (1.25e5, 1.25e10):
        nic = {"latency_s": 1e-4, "bandwidth_bytes_per_s": bandwidth}
        where = cluster({"count": 4}, step_time="constant(seconds=0.01)", nic=nic)
        folder = tmp_path / f"{bandwidth:g}"
        simulate(cluster=where, strategy="synchronous(compress=int8(dense_below=0))", out=folder, **JOB)
        found = why(folder)
        gains[bandwidth] = {change.what: change.gain for change in found.changes}["no compression"]
        assert "to compress saves" in found.compression
    assert gains[1.25e5] < -0.3
    assert gains[1.25e10] > 0
