"""Step times of a simulation follow its network and batch as far as the cluster says of what they are."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from polyrhythm.api.simulate import paced_for, simulate
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import Cluster
from unit.simulation.clusters import cluster

JOB = {"data": "digits", "model": "mlp", "batch_size": 32, "workers": 1}
MLP_STEP = 32 * (2 * (64 * 64 + 64 * 10) + 64 * 10)
"""Multiply-adds of 64-64-10: forward, gradients of weights, and of the inputs of all but the first layer."""


def paced(what: dict[str, Any], **job: Any) -> Cluster:
    return paced_for(cluster({}, step_of=what), configure({}, {**JOB, **job}))


def test_a_step_takes_its_arithmetic_over_a_share_of_the_peak() -> None:
    found = paced({"peak_multiply_adds_per_s": 1e9, "share_of_peak": 0.5})
    assert found.step_factor == pytest.approx(MLP_STEP / 5e8)
    again = paced({"peak_multiply_adds_per_s": 1e9, "share_of_peak": 0.5}, batch_size=64)
    assert again.step_factor == pytest.approx(2 * found.step_factor)


def test_a_measured_step_scales_with_the_batch_but_for_its_overhead() -> None:
    of = {"model": "mlp", "batch_size": 32, "multiply_adds": MLP_STEP, "overhead_share": 0.5}
    assert paced(of).step_factor == pytest.approx(1)
    assert paced(of, batch_size=96).step_factor == pytest.approx(0.5 + 0.5 * 3)


def test_a_step_time_of_another_network_comes_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert paced({"model": "mlp", "batch_size": 32}).step_factor == 1
    assert not caplog.records
    paced({"model": "resnet50", "batch_size": 128})
    assert "its step time is that of resnet50 at a batch of 128, and is taken for mlp" in caplog.text
    caplog.clear()
    paced({"model": "lenet5", "multiply_adds": 1e6})
    assert "follow from those of lenet5 by their arithmetic alone" in caplog.text


def test_another_precision_than_the_measured_one_is_measured_and_not_guessed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = {"model": "mlp", "batch_size": 32, "precision": "float32"}
    with caplog.at_level(logging.WARNING):
        for precision in ("auto", "float32"):
            assert paced(of, precision=precision).step_factor == 1
        assert paced({**of, "precision": "bfloat16"}, precision="bfloat16").step_factor == 1
        assert not caplog.records
        with pytest.raises(RequestError, match=r"computed in float32; .*profile --precision bfloat16"):
            paced(of, precision="bfloat16")
        paced({"model": "mlp"}, precision="bfloat16")
    assert "the precision of its steps is unknown" in caplog.text


def test_gradients_are_halved_by_their_transfer_and_not_by_the_precision(tmp_path: Any) -> None:
    def sent(name: str, strategy: str, **options: Any) -> float:
        job = {**JOB, "workers": 2, "strategy": strategy, **options}
        run = simulate(cluster=cluster({"count": 2}), gradients="none", steps=5, out=tmp_path / name, **job)
        return float(run.figures["bytes_sent_per_step"])

    whole = sent("float32", "synchronous")
    assert sent("bfloat16", "synchronous", precision="bfloat16") == whole
    assert sent("transfer", "synchronous(transfer=bfloat16)") == pytest.approx(whole / 2, rel=0.1)


def test_a_dry_run_takes_as_long_as_its_network_needs(tmp_path: Any) -> None:
    where = cluster({}, step_of={"peak_multiply_adds_per_s": 1e9, "share_of_peak": 0.5})
    run = simulate(cluster=where, gradients="none", steps=10, out=tmp_path / "run", **JOB)
    assert run.figures["seconds"] == pytest.approx(10 * MLP_STEP / 5e8, rel=1e-6)
    assert run.figures["price"] is None  # not known, which is not 0
    told = simulate(
        cluster=where,
        gradients="none",
        steps=10,
        step_time="constant(seconds=2)",
        out=tmp_path / "told",
        **JOB,
    )
    assert told.figures["seconds"] == pytest.approx(20)
