"""`why`: what it predicts of a change is what the simulator then shows, and real runs need a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.api.simulate import simulate
from polyrhythm.api.why import predict_run, why
from polyrhythm.errors import RequestError
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.simulation.cluster import cluster_text
from unit.simulation.clusters import cluster

JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "workers": 4, "epochs": 2, "batch_size": 32}
ONE = "parameter_server(consistency=synchronous, servers=1, placement=dedicated)"
TWO = "parameter_server(consistency=synchronous, servers=2, placement=dedicated)"


def test_a_second_server_gains_what_it_then_does(tmp_path: Path) -> None:
    """A server that carries so little that the step is mostly waiting for it."""
    where = cluster({"count": 8}, step_time="constant(seconds=0.1)", server_bandwidth_bytes_per_s=5e5)
    one = simulate(cluster=where, strategy=ONE, out=tmp_path / "one", **JOB)
    two = simulate(cluster=where, strategy=TWO, out=tmp_path / "two", **JOB)
    truth = two.figures["images_per_s"] / one.figures["images_per_s"] - 1
    assert truth > 0.3
    found = why(tmp_path / "one")
    assert found.rehearsed_images_per_s == pytest.approx(one.figures["images_per_s"], rel=0.1)
    by_name = {change.what: change for change in found.changes}
    assert by_name["2 servers on hosts of their own"].gain == pytest.approx(truth, rel=0.15)
    assert found.changes[0].gain == max(change.gain for change in found.changes)
    batch = by_name["a batch of 64"]
    assert 0 < batch.gain < 1  # twice the computing, the same messages
    assert "more images" in batch.caution
    assert "network" in found.held_back or "server" in found.held_back


def test_a_run_that_computes_all_the_time_gains_nothing_from_servers(tmp_path: Path) -> None:
    where = cluster({"count": 8}, step_time="constant(seconds=1)")
    simulate(cluster=where, strategy=ONE, out=tmp_path / "run", **{**JOB, "epochs": 1})
    gains = {change.what: change.gain for change in why(tmp_path / "run").changes}
    assert gains["2 servers on hosts of their own"] == pytest.approx(0, abs=0.01)
    assert gains["a batch of 64"] == pytest.approx(0, abs=0.05)


def test_a_report_shows_what_was_predicted_beside_what_happened(tmp_path: Path) -> None:
    """On the cluster that it ran on the prediction is right; on one of half the speed it is half the rate."""
    where = cluster({"count": 4}, step_time="constant(seconds=0.1)")
    run = simulate(cluster=where, strategy="synchronous", out=tmp_path / "run", **JOB)
    other = tmp_path / "slower.yaml"
    other.write_text(cluster_text(cluster({"count": 4}, name="slower", step_time="constant(seconds=0.2)")))
    for machines, factor in ((tmp_path / "run" / "cluster.yaml", 1.0), (other, 0.5)):
        told = json.loads(predict_run(tmp_path / "run", machines).read_text())
        assert told["images_per_s"] == pytest.approx(
            factor * 1280
        )  # four batches of 32 in a tenth of a second
        page = write_report(tmp_path / "run").read_text()
        assert "Predicted, and what happened" in page
        off = told["images_per_s"] / run.figures["images_per_s"] - 1  # the run's last batches are smaller
        assert f"<td>{100 * off:+.1f} %</td>" in page
        assert f"on {told['cluster']}: a dry run" in page
    (tmp_path / "run" / "prediction.json").write_text('{"cluster": "x"}')
    assert "Predicted" not in write_report(tmp_path / "run").read_text()


def test_a_real_run_is_held_against_its_own_record(tmp_path: Path) -> None:
    """Without the cluster file it is as a real run: its steps and its throughput say what machines it had."""
    link = {"latency_s": 0, "bandwidth_bytes_per_s": 1e6}
    where = cluster({"count": 1, "workers": 2}, step_time="constant(seconds=0.1)", inside=link)
    job = {**JOB, "workers": 2, "epochs": 1}
    run = simulate(cluster=where, strategy="synchronous", out=tmp_path / "run", **job)
    (tmp_path / "run" / "cluster.yaml").unlink()
    found = why(tmp_path / "run")
    assert not found.another
    assert found.cluster == "the run's own record"
    assert found.rehearsed_images_per_s == pytest.approx(run.figures["images_per_s"], rel=0.02)
    other = why(tmp_path / "run", cluster="office")
    assert other.another
    assert other.cluster == "office"
    with pytest.raises(RequestError):
        why(tmp_path / "nothing")


PLANTED: dict[str, dict[str, Any]] = {
    "slower workers": {"slow": {2: 3.0}},
    "the network": {"nic": {"latency_s": 1e-3, "bandwidth_bytes_per_s": 3e5}},
    "steps of unequal length": {"step_time": "exponential(mean=0.1)"},
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_first_and_its_gain_is_that_of_a_run_without_it(
    tmp_path: Path, cause: str
) -> None:
    healthy: dict[str, Any] = {"step_time": "constant(seconds=0.1)"}
    job = {**JOB, "strategy": "synchronous", "balance": "off", "gradients": "none", "epochs": 4}
    ill = simulate(
        cluster=cluster({"count": 4}, **{**healthy, **PLANTED[cause]}), out=tmp_path / "ill", **job
    )
    well = simulate(cluster=cluster({"count": 4}, **healthy), out=tmp_path / "well", **job)
    truth = well.figures["images_per_s"] / ill.figures["images_per_s"] - 1
    assert truth > 0.2
    first = why(tmp_path / "ill").causes[0]
    assert first.what == cause
    assert first.gain == pytest.approx(truth, abs=0.1)
    assert first.remedy


def test_a_healthy_run_has_no_cause(tmp_path: Path) -> None:
    where = cluster({"count": 4}, step_time="constant(seconds=1)")
    simulate(cluster=where, strategy="synchronous", out=tmp_path / "run", **{**JOB, "epochs": 1})
    assert all(cause.gain < 0.02 for cause in why(tmp_path / "run").causes)
