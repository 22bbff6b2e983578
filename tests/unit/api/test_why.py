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


@pytest.fixture(autouse=True)
def _dry_runs_are_short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are all alike need few; a mean of unequal ones needs many."""
    if "unequal" not in request.node.name:
        monkeypatch.setattr("polyrhythm.api.why._STEPS_OF_ALL", 160)


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
    batch = by_name["--batch-size 64"]
    assert 0 < batch.gain < 1  # twice the computing, the same messages
    assert "more images" in batch.caution
    assert "communication" in found.held_back or "server" in found.held_back


def test_a_run_that_computes_all_the_time_gains_nothing_from_servers(tmp_path: Path) -> None:
    where = cluster({"count": 8}, step_time="constant(seconds=1)")
    simulate(cluster=where, strategy=ONE, out=tmp_path / "run", **{**JOB, "epochs": 1})
    gains = {change.what: change.gain for change in why(tmp_path / "run").changes}
    assert gains["2 servers on hosts of their own"] == pytest.approx(0, abs=0.01)
    assert gains["--batch-size 64"] == pytest.approx(0, abs=0.05)


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
        assert "Prediction and run" in page
        off = told["images_per_s"] / run.figures["images_per_s"] - 1  # the run's last batches are smaller
        assert f">{100 * off:+.1f} %</td>" in page
        assert f"A dry run in virtual time on {told['cluster']}" in page
    (tmp_path / "run" / "prediction.json").write_text('{"cluster": "x"}')
    assert "Prediction" not in write_report(tmp_path / "run").read_text()


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
    assert found.rehearsed_images_per_s == pytest.approx(run.figures["images_per_s"], rel=0.03)
    other = why(tmp_path / "run", cluster="office")
    assert other.another
    assert other.cluster == "office"
    with pytest.raises(RequestError):
        why(tmp_path / "nothing")


def test_a_run_that_was_resumed_with_fewer_workers(tmp_path: Path) -> None:
    where = cluster({"count": 1, "workers": 4}, step_time="constant(seconds=0.1)")
    for name, workers in (("four", 4), ("two", 2)):
        simulate(cluster=where, strategy="synchronous", out=tmp_path / name, **{**JOB, "workers": workers})
    (tmp_path / "two" / "cluster.yaml").unlink()
    before, after = ((tmp_path / name / "events.jsonl").read_text() for name in ("four", "two"))
    start, rest = after.split("\n", 1)
    resumed = json.dumps({**json.loads(start), "start_epoch": JOB["epochs"]})
    (tmp_path / "two" / "events.jsonl").write_text(f"{before}{resumed}\n{rest}")
    found = why(tmp_path / "two")
    assert "idle" not in found.time
    assert found.rehearsed_images_per_s == pytest.approx(2 * 32 / 0.1, rel=0.1)


@pytest.mark.parametrize("bandwidth", [1e5, 1e10])
def test_the_link_of_a_real_run_is_as_fast_as_makes_its_dry_run_as_fast_as_it(
    tmp_path: Path, bandwidth: float
) -> None:
    """Whatever was measured afterwards: then the machine may have been less busy, or more."""
    link = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e6}
    where = cluster({"count": 1, "workers": 2}, step_time="constant(seconds=0.1)", inside=link)
    run = simulate(
        cluster=where, strategy="synchronous", out=tmp_path / "run", **{**JOB, "workers": 2, "epochs": 1}
    )
    (tmp_path / "run" / "cluster.yaml").unlink()
    path = tmp_path / "run" / "environment.json"
    measured = {"latency_s": 1e-5, "bandwidth_bytes_per_s": bandwidth}
    path.write_text(json.dumps({**json.loads(path.read_text()), "link": measured}))
    found = why(tmp_path / "run")
    full = 23 * 2 * 32 / 1437  # the last batches of the epoch are smaller
    assert found.rehearsed_images_per_s == pytest.approx(full * run.figures["images_per_s"], rel=0.03)
    assert found.causes[0].what == "the network"
    assert found.causes[0].gain == pytest.approx(2 * 32 / 0.1 / run.figures["images_per_s"] - 1, abs=0.05)


def test_processes_on_the_same_cores_and_tests_are_causes_of_a_real_run(tmp_path: Path) -> None:
    """Half of every step was spent waiting for a core, and a second of each epoch on its test."""
    where = cluster({"count": 1, "workers": 4}, step_time="constant(seconds=0.1)")
    job = {**JOB, "strategy": "synchronous", "epochs": 4, "balance": "off"}
    simulate(cluster=where, out=tmp_path / "run", **job)
    (tmp_path / "run" / "cluster.yaml").unlink()
    log = tmp_path / "run" / "events.jsonl"
    later_s, lines = 0.0, []
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "Evaluated":
            later_s += 1.0
        if event["event"] == "WorkerProgress":
            event["processor_s"] = 0.05 * event["steps"]
        if event["event"] == "RunStarted":
            event |= {"threads": 1, "cores": 2}
        lines.append(json.dumps({**event, "time_s": event["time_s"] + later_s}))
    log.write_text("\n".join(lines) + "\n")
    found = why(tmp_path / "run")
    causes = {cause.what: cause for cause in found.causes}
    step_s = 4 * 32 / found.rehearsed_images_per_s
    assert 4 * 32 / (found.rehearsed_images_per_s * (1 + causes["tests"].gain)) == pytest.approx(
        0.1, rel=0.03
    )
    (fewer,) = (change for change in found.changes if change.what == "--workers 2 (one per core)")
    waited_s = 0.05 * 0.1 / step_s  # the rest was in tests, which count already
    tested_s = (step_s - 0.1) / 2  # as many tests for twice the steps
    assert 2 * 32 / fewer.images_per_s == pytest.approx(step_s - waited_s - tested_s, rel=0.05)
    assert fewer.gain < 0  # half the workers, and tests take as long
    assert causes["more processes than cores"].remedy == ""
    assert "tests" in found.time


@pytest.mark.parametrize("update_s", [0.002, 0.02, 0.1])
def test_time_of_servers_in_a_real_run_is_not_taken_for_that_of_links(
    tmp_path: Path, update_s: float
) -> None:
    """What a strategy without servers gains, from the record alone."""
    link = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e8}
    update = {"seconds": update_s, "bandwidth_bytes_per_s": 1e12}
    one = {"count": 1, "workers": 2, "cores": 4, "server_takes": 0.0}
    where = cluster(one, step_time="constant(seconds=0.05)", inside=link, nic=link, server_update=update)
    job = {
        "data": "digits",
        "model": "mlp",
        "workers": 2,
        "batch_size": 32,
        "gradients": "none",
        "steps": 200,
    }
    before = simulate(
        cluster=where, strategy="parameter_server(servers=1)", out=tmp_path / "run", **job
    ).figures["images_per_s"]
    (tmp_path / "run" / "cluster.yaml").unlink()
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "link": link}))
    (change,) = (each for each in why(tmp_path / "run").changes if each.what == "local_sgd(steps=8)")
    after = simulate(cluster=where, strategy="local_sgd(steps=8)", out=tmp_path / "after", **job).figures[
        "images_per_s"
    ]
    assert change.gain == pytest.approx(after / before - 1, abs=0.1)


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


SERVED = [{"count": 4}, {"count": 1}]
AT_SERVERS: dict[str, dict[str, Any]] = {
    "the network": {
        "hosts": [{"count": 4}, {"count": 1, "nic": {"latency_s": 5e-2, "bandwidth_bytes_per_s": 1e9}}]
    },
    "the servers": {"server_update": {"seconds": 5e-2, "bandwidth_bytes_per_s": 1e9}},
}


@pytest.mark.parametrize("cause", AT_SERVERS)
def test_a_far_server_is_told_from_a_busy_one_and_the_remedy_gains_what_was_predicted(
    tmp_path: Path, cause: str
) -> None:
    changed = dict(AT_SERVERS[cause])
    ill = cluster(*changed.pop("hosts", SERVED), step_time="constant(seconds=0.1)", **changed)
    well = cluster(*SERVED, step_time="constant(seconds=0.1)")
    job = {key: value for key, value in JOB.items() if key != "epochs"}
    job |= {"strategy": ONE, "gradients": "none", "steps": 200}
    before = simulate(cluster=ill, out=tmp_path / "ill", **job).figures["images_per_s"]
    truth = simulate(cluster=well, out=tmp_path / "well", **job).figures["images_per_s"] / before - 1
    found = why(tmp_path / "ill")
    first = found.causes[0]
    assert first.what == cause
    assert first.gain == pytest.approx(truth, abs=0.1)
    (remedy,) = (change for change in found.changes if change.what == first.remedy)
    after = simulate(cluster=ill, out=tmp_path / "remedy", **{**job, **remedy.options}).figures[
        "images_per_s"
    ]
    assert after / before - 1 == pytest.approx(first.remedy_gain, abs=0.1)


@pytest.mark.parametrize(
    "strategy",
    [
        "synchronous",
        "local_sgd(steps=4)",
        ONE,
        "mixed(replicas=2, servers=1, placement=dedicated)",
        "mixed(replicas=2, servers=1, placement=dedicated, consistency=synchronous)",
    ],
)
def test_shares_by_speed_gain_what_summary_and_why_predict_of_a_short_run(
    strategy: str, tmp_path: Path
) -> None:
    """One worker has a third of the speed. A tenth of the steps pass before shares are decided."""
    where = cluster({"count": 5}, step_time="constant(seconds=0.05)", slow={2: 3.0})
    job: dict[str, Any] = {**JOB, "gradients": "none", "steps": 40, "strategy": strategy}
    job = {key: value for key, value in job.items() if key != "epochs"}
    before = simulate(cluster=where, out=tmp_path / "run", balance="off", **job).figures
    after = simulate(cluster=where, out=tmp_path / "balanced", balance="measured", **job).figures
    gained = after["images_per_s"] / before["images_per_s"] - 1
    found = why(tmp_path / "run").causes[0]
    assert (found.what, found.remedy) == ("slower workers", "--balance measured")
    assert found.remedy_gain == pytest.approx(gained, abs=0.03)
    assert before["held_back"]["cause"] == "stragglers"
    assert before["held_back"]["remedy_gain"] == pytest.approx(gained, abs=0.1)


def test_a_healthy_run_has_no_cause(tmp_path: Path) -> None:
    where = cluster({"count": 4}, step_time="constant(seconds=1)")
    simulate(cluster=where, strategy="synchronous", out=tmp_path / "run", **{**JOB, "epochs": 1})
    assert all(cause.gain < 0.02 for cause in why(tmp_path / "run").causes)


@pytest.mark.parametrize(("busy", "cause"), [(0.9, "decoding and augmentation"), (0.1, "reading of images")])
def test_images_that_are_read_or_decoded_slowly_are_causes_of_a_real_run(
    tmp_path: Path, busy: float, cause: str
) -> None:
    """Half of every step waited for its batch; kept images are waited for in the first of four epochs alone."""
    where = cluster({"count": 1, "workers": 4}, step_time="constant(seconds=0.1)")
    job = {**JOB, "strategy": "synchronous", "epochs": 4, "balance": "off", "cache": "none"}
    simulate(cluster=where, out=tmp_path / "run", **job)
    (tmp_path / "run" / "cluster.yaml").unlink()
    log = tmp_path / "run" / "events.jsonl"
    lines = []
    for line in log.read_text().splitlines():
        event = json.loads(line)
        lines.append(line)
        if event["event"] == "WorkerProgress":
            waited_s = 0.05 * event["steps"]
            waited = {"event": "InputWaited", "seconds": waited_s, "busy_s": busy * waited_s}
            lines.append(json.dumps({**waited, "time_s": event["time_s"], "worker": event["worker"]}))
    log.write_text("\n".join(lines) + "\n")
    found = why(tmp_path / "run")
    first = found.causes[0]
    assert first.what.startswith(cause)
    assert first.what.split()[0] in found.held_back
    step_s = 4 * 32 / found.rehearsed_images_per_s
    assert first.gain == pytest.approx(step_s / (step_s - 0.05) - 1, abs=0.05)
    assert first.remedy == "--cache auto"
    assert first.remedy_gain == pytest.approx(4 / (1 + 3 / (1 + first.gain)) - 1)


def test_tests_that_stop_the_steps_are_relieved_by_tests_beside_them(tmp_path: Path) -> None:
    where = cluster({"count": 1, "workers": 2}, step_time="constant(seconds=0.1)")
    job = {**JOB, "strategy": "synchronous", "workers": 2, "epochs": 3, "balance": "off"}
    simulate(cluster=where, out=tmp_path / "run", **job)
    (tmp_path / "run" / "cluster.yaml").unlink()
    log = tmp_path / "run" / "events.jsonl"
    late_s, lines = 0.0, []
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "Evaluated":
            late_s += 20.0
        event["time_s"] += late_s
        lines.append(json.dumps(event))
    log.write_text("\n".join(lines) + "\n")
    first = why(tmp_path / "run").causes[0]
    assert (first.what, first.remedy) == ("tests", "--evaluation async")
    assert first.remedy_gain == first.gain > 1
