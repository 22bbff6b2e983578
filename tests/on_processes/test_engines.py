"""Jobs handed to engines that really run: ssh to this machine, a Slurm cluster of two nodes, a Ray cluster of two."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from on_processes.commands import Result, Started, finished, wait_for
from on_processes.engines import may_log_in, missing, ranks_of, slurm_cluster, ssh_server
from on_processes.runs import ending
from polyrhythm.events import CheckpointSaved, Evaluated, RunEnded, RunStarted, WorkerJoined
from polyrhythm.reporting.event_log import read_events

WHOLE = [sys.executable, "-m", "polyrhythm", "submit"]
TRAIN = ["train", "--data", "digits", "--model", "mlp", "--threads", "1"]
SERVED = [*TRAIN, "--strategy", "parameter_server(servers=1)", "--workers", "2"]
LONG = ["--epochs", "100000"]


def happened(run: Path, *kinds: type) -> bool:
    log = run / "events.jsonl"
    found = {type(event) for event in read_events(log)} if log.exists() else set()
    return found >= set(kinds)


def killed(run: Path, rank: int) -> None:
    """Kills the process of a rank once the run is under way, and could be gone on with."""
    wait_for(lambda: happened(run, CheckpointSaved), "a checkpoint")
    os.kill(ranks_of(run)[rank], signal.SIGKILL)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    if lacking := missing("sshd", "ssh"):
        pytest.skip(f"needs {', '.join(lacking)}")
    if not may_log_in():
        pytest.skip("this user has no login shell, and sshd lets in none without one")
    with ssh_server(tmp_path_factory.mktemp("ssh")) as found:
        yield found


def engine(folder: Path, ssh: tuple[int, str], *hosts: str, **keys: str) -> list[str]:
    port, options = ssh
    (folder / "hosts").write_text("".join(f"{host} port={port}\n" for host in hosts))
    more = "".join(f", {key}={value}" for key, value in keys.items())
    return ["--engine", f"ssh(hosts='hosts', options='{options}'{more})"]


def test_ssh_starts_a_lost_rank_again_and_passes_on_the_wish_to_stop(
    tmp_path: Path, ssh: tuple[int, str]
) -> None:
    run = tmp_path / "run"
    words = [
        *WHOLE,
        *engine(tmp_path, ssh, "localhost slots=2", "127.0.0.1"),
        "--",
        *SERVED,
        *LONG,
        "--out",
        str(run),
    ]
    with ending() as started:
        started.append(job := Started(words, tmp_path, run))
        killed(run, 1)
        wait_for(lambda: happened(run, WorkerJoined), "the successor")
        job.process.send_signal(signal.SIGINT)
        result = job.result()
    assert result.status == 130, result.err
    assert "rank 1 on localhost was killed by signal 9: it is started again" in result.err
    assert f"continue with: polyrhythm train --resume {run}" in result.err
    assert happened(run, CheckpointSaved, RunEnded)
    assert not ranks_of(run)


def test_ssh_fetches_the_run_of_a_host_with_folders_of_its_own(tmp_path: Path, ssh: tuple[int, str]) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (here / "recipe.yaml").write_text("data: digits\nmodel: mlp\nepochs: 2\nthreads: 1\n")
    words = [
        *WHOLE,
        *engine(here, ssh, f"localhost directory={there}"),
        "--json",
        "--",
        "train",
        "recipe.yaml",
    ]
    result = finished([*words, "--workers", "1", "--out", "runs/a"], here)
    assert result.status == 0, result.err
    assert (there / "runs" / "a" / "model.safetensors").exists()
    fetched = (here / "runs" / "a" / "model.safetensors").read_bytes()
    assert fetched == (there / "runs" / "a" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("hosts", "more", "complaint"),
    [
        (
            ["localhost directory=/tmp"],
            ["--data", "photos/of/cats"],
            "localhost has no photos/of/cats in /tmp",
        ),
        (["localhost python=/usr/bin/false"], [], "localhost cannot be reached: ssh ended with status 1"),
        (["localhost python=/no/python"], [], "install Polyrhythm there, name its Python"),
        (["nobody@localhost"], [], "localhost cannot be reached"),
        (["localhost slots=2"], [], "has 2 slots, and the command asks for 1 workers"),
    ],
    ids=["no data", "no answer", "no python", "no entry", "slots"],
)
def test_what_a_host_lacks_is_said_in_a_line_before_anything_runs(
    tmp_path: Path, ssh: tuple[int, str], hosts: list[str], more: list[str], complaint: str
) -> None:
    words = [*WHOLE, *engine(tmp_path, ssh, *hosts), "--", *TRAIN, "--workers", "1", *more, "--out", "run"]
    result = finished(words, tmp_path)
    assert result.status == 2, result.err
    assert complaint in result.complaint
    assert not (tmp_path / "run").exists()


def test_a_host_with_another_version_is_named(tmp_path: Path, ssh: tuple[int, str]) -> None:
    old = tmp_path / "old" / "timm-0.0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.0.1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={old.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = [*WHOLE, *engine(tmp_path, ssh, f"localhost python={python}"), "--", *TRAIN, "--workers", "1"]
    assert "localhost has timm 0.0.1, and this host has" in finished(words, tmp_path).complaint


@pytest.mark.timeout(400)  # a cluster, two runs and a replacement, one after the other
def test_ray_makes_the_rank_of_a_lost_node_again_on_another(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    run = tmp_path / "run"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        with ending() as started:
            spec = f"ray(address='{cluster.address}', placement=PACK)"
            words = [*WHOLE, "--engine", spec, "--", *TRAIN, "--workers", "3", *LONG, "--out", str(run)]
            started.append(job := Started(words, tmp_path, run))
            wait_for(lambda: happened(run, Evaluated), "an epoch")
            ranks = set(ranks_of(run))
            assert ranks == {0, 1, 2}
            cluster.remove_node(lost)
            cluster.add_node(num_cpus=1)
            wait_for(lambda: "is gone" in (tmp_path / "run.err").read_text(), "the loss")
            wait_for(lambda: happened(run, WorkerJoined), "the successor")
            job.process.send_signal(signal.SIGINT)
            result = job.result()
        assert result.status == 130, result.err
        crowd = [*WHOLE, "--engine", spec, "--", *TRAIN, "--workers", "30", "--out", "crowd"]
        assert "the cluster has no place for 30 ranks of 1 CPU each" in finished(crowd, tmp_path).complaint
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15 otherwise: beside other tests its workers hardly run
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


def _example(name: str, address: str, folder: Path, *options: str) -> Result:
    path = Path(__file__).parents[2] / "examples" / name
    result = finished(["env", f"RAY_ADDRESS={address}", sys.executable, str(path), *options], folder)
    assert result.status == 0, result.err
    return result


def test_ray_train_starts_ranks_of_its_own(tmp_path: Path, ray_address: str) -> None:
    _example("ray_train.py", ray_address, tmp_path, "--out", str(tmp_path / "run"))
    (begun,) = [
        event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, RunStarted)
    ]
    assert begun.workers == 2
    assert happened(tmp_path / "run", RunEnded)


def test_ray_tune_ends_the_worse_trial_early(tmp_path: Path, ray_address: str) -> None:
    out = tmp_path / "search"
    one_by_one = ["--strategies", "synchronous", "--rates", "0.1,0.000001", "--at-once", "1"]
    shown = _example(
        "ray_tune.py",
        ray_address,
        tmp_path,
        *one_by_one,
        "--epochs",
        "3",
        "--workers",
        "1",
        "--out",
        str(out),
    ).out
    lines = re.findall(r"^synchronous +lr (\S+) +epoch +(\d)  top-1 (\S+) %$", shown, re.MULTILINE)
    assert [(rate, epoch) for rate, epoch, _ in lines] == [("0.1", "3"), ("1e-06", "1")]
    assert "best: synchronous with a rate of 0.1\n" in shown
    runs = sorted((out / "trials").iterdir())  # by Ray's names of the trials, which are numbered
    tests = [
        [event for event in read_events(run / "events.jsonl") if isinstance(event, Evaluated)] for run in runs
    ]
    assert len(tests[0]) == 3
    # The second run may have made more tests by the time at which its first was answered.
    for each, (_, epoch, top1) in zip(tests, lines, strict=True):
        assert f"{100 * each[int(epoch) - 1].test_top1:.1f}" == top1
    assert happened(runs[0], RunEnded)  # which Ray lets finish, though its last epoch is the scheduler's last
    assert (runs[0] / "report.html").exists()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    if os.geteuid():
        pytest.skip("only root may start Slurm's daemons for others")
    if lacking := missing("slurmctld", "slurmd", "munged", "sbatch"):
        pytest.skip(f"needs {', '.join(lacking)}")
    folder = tmp_path_factory.mktemp("slurm")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
    with slurm_cluster(folder) as call:
        yield call
    if before is None:
        del os.environ["SLURM_CONF"]


@pytest.mark.parametrize("victim", [1, 2], ids=["worker", "server"])
def test_a_slurm_job_outlives_a_rank_beside_servers_of_their_own(tmp_path: Path, slurm, victim: int) -> None:
    run = tmp_path / "run"
    spec = "slurm(server_options='--nodelist=n2', options='--nodelist=n1')"
    words = [*WHOLE, "--engine", spec, "--wait", "--", *SERVED, "--epochs", "30", "--out", str(run)]
    with ending() as started:
        started.append(job := Started(words, tmp_path, run))
        killed(run, victim)
        result = job.result()
    assert result.status == 0, result.err
    assert happened(run, RunEnded)
    (log,) = tmp_path.glob("slurm-*.out")
    lost = {1: "worker 1 (rank 1) is lost", 2: "error: rank 2 is gone"}
    assert lost[victim] in log.read_text()
    begun = [event for event in read_events(run / "events.jsonl") if isinstance(event, RunStarted)]
    assert len(begun) == victim  # without its server the run ends, and the job's next `srun` goes on with it
    assert begun[-1].start_epoch >= victim - 1


def test_the_jobs_of_a_slurm_array_share_the_trials_of_a_search(tmp_path: Path, slurm) -> None:
    (tmp_path / "space.yaml").write_text("lr: [0.01, 0.02, 0.05, 0.1]\n")
    search = ["tune", "space.yaml", "--method", "grid", "--epochs", "1", "--data", "digits", "--model", "mlp"]
    words = [
        *WHOLE,
        "--engine",
        "slurm(array=2)",
        "--wait",
        "--",
        *search,
        "--workers",
        "1",
        "--out",
        "search",
    ]
    result = finished(words, tmp_path)
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "search" / "search.json").read_text())
    assert sorted(trial["parameters"]["lr"] for trial in found["trials"]) == [0.01, 0.02, 0.05, 0.1]
    assert {trial["state"] for trial in found["trials"]} == {"done"}
    told = [log.read_text() for log in sorted(tmp_path.glob("slurm-*.out"))]
    made = [re.findall(r"^\[\d+/20\] trial (\d+):", text, re.MULTILINE) for text in told]
    assert len(made) == 2
    assert sorted(int(number) for each in made for number in each) == [0, 1, 2, 3]
    assert all(made), "one of them has made all trials"


def test_a_slurm_job_comes_back_on_fewer_nodes_after_its_notice(tmp_path: Path, slurm) -> None:
    run = tmp_path / "run"
    spec = "slurm(nodes='1-2', tasks_per_node=2)"
    started = finished(
        [*WHOLE, "--engine", spec, "--json", "--", *SERVED, *LONG, "--out", str(run)], tmp_path
    )
    job = started.figures["job"]
    wait_for(lambda: happened(run, Evaluated), "an epoch")
    slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        slurm("scancel", "--signal=TERM", job)
        wait_for(
            lambda: "PENDING" in slurm("squeue", "--noheader", "--job", job, "--format=%T"), "the requeue"
        )
        assert _begun(run) == [3]
        # It waits two minutes otherwise. A start within the second in which its nodes ended it is refused by them, and
        # ends the job for good: they take it for the launch that they have been told to end.
        slurm("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        wait_for(lambda: _begun(run) == [3, 1], "the run to continue with one worker and its server")
        assert "n1" in slurm("squeue", "--noheader", "--job", job, "--format=%N")
    finally:
        slurm("scancel", job)
        slurm("scontrol", "update", "NodeName=n2", "State=RESUME")


def _begun(run: Path) -> list[int]:
    return [event.workers for event in read_events(run / "events.jsonl") if isinstance(event, RunStarted)]


def test_slurm_refuses_a_partition_that_it_has_not(tmp_path: Path, slurm) -> None:
    words = [*WHOLE, "--engine", "slurm(partition=nowhere)", "--", *TRAIN, "--workers", "2"]
    assert (
        "Slurm refuses the job: invalid partition specified: nowhere" in finished(words, tmp_path).complaint
    )
