"""`polyrhythm profile`: on one host, and over a cable of known speed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multiprocess.commands import PATIENCE_S, POLYRHYTHM, environment, shell
from polyrhythm.simulation.cluster_file import open_cluster

PROFILE = ["profile", "--data", "digits", "--model", "mlp", "--steps", "5", "--json"]
MEGABITS = 400


def test_a_profile_can_be_simulated(tmp_path: Path) -> None:
    measured, again = shell(tmp_path, [*PROFILE, "--out", "here.yaml"], [*PROFILE, "--out", "here.yaml"])
    figures = measured.figures
    written = (tmp_path / "here.yaml").read_text()
    cluster = open_cluster(tmp_path / "here.yaml")
    assert cluster.inside.latency_s == figures["inside"]["latency_s"] > 0
    assert cluster.inside.bandwidth_bytes_per_s == figures["inside"]["bandwidth_bytes_per_s"]
    assert figures["step_s"] > figures["forward_s"] + figures["backward_s"] > 0
    assert sum(layer["parameters"] for layer in figures["layers"]) == 64 * 64 + 64 + 64 * 10 + 10
    assert again.complaint == "here.yaml exists: name another file with --out, or remove it"
    (tmp_path / "steady.yaml").write_text(re.sub(r"sigma=[\d.e-]+", "sigma=0", written))
    names = ("here", "steady")
    simulate = ["simulate", "--data", "digits", "--model", "mlp", "--epochs", "1", "--workers", "1", "--json"]
    runs = shell(tmp_path, *([*simulate, "--cluster", f"{name}.yaml", "--out", name] for name in names))
    spread, steady = (run.figures for run in runs)
    # Alone, a worker's epoch takes its 23 steps' measured time, and where they vary as was measured, another.
    assert steady["steps"] == 23
    assert steady["seconds"] == pytest.approx(steady["steps"] * figures["step_s"], rel=0.01)
    assert 0 < spread["seconds"] != steady["seconds"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_the_link_between_two_hosts(tmp_path: Path, hosts: list[str]) -> None:
    for host in hosts:
        shaped = ["tbf", "rate", f"{MEGABITS}mbit", "burst", "32kb", "latency", "400ms"]
        command = ["tc", "-n", host, "qdisc", "add", "dev", "cable", "root", *shaped]
        subprocess.run(command, check=True, capture_output=True)
    ranks = [_rank(number, host, tmp_path) for number, host in enumerate(hosts)]
    ends = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    figures = json.loads(ends[0][0])
    assert not ends[1][0], "rank 0 alone prints the figures"
    assert len(figures["hosts"]) == 2
    # Frames of 1,514 bytes carry 1,448 of ours; a busy machine can only be slower.
    limit = MEGABITS * 1e6 / 8 * 1448 / 1514
    assert 0.7 * limit < figures["between"]["bandwidth_bytes_per_s"] < 1.02 * limit
    assert open_cluster(tmp_path / "two.yaml").nic.latency_s == figures["between"]["latency_s"]


def _rank(number: int, host: str, folder: Path) -> subprocess.Popen[str]:
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *(
            f"--node-rank={number}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=10.78.0.1:29400",
            "--rdzv-id=test",
        ),
        *(f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr=10.78.0.{number + 1}"),
    ]
    command = ["ip", "netns", "exec", host, *agent, "--no-python", POLYRHYTHM, *PROFILE, "--out", "two.yaml"]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
