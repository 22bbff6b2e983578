"""`polyrhythm profile`: on one host, and over a cable of known speed."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from on_processes.commands import Started, shell
from on_processes.runs import ending
from on_processes.two_hosts import tool
from on_processes.verb import POLYRHYTHM
from polyrhythm.simulation.cluster import open_cluster

PROFILE = ["profile", "--data", "digits", "--model", "mlp", "--steps", "5", "--json"]
MEGABITS = 400
ATTEMPTS = 3
"""A machine that does other work as well may once be too slow for the cable, or for empty messages, but not always."""


def test_a_profile_can_be_simulated(tmp_path: Path) -> None:
    measured, again = shell(tmp_path, [*PROFILE, "--out", "here.yaml"], [*PROFILE, "--out", "here.yaml"])
    figures = measured.figures
    written = (tmp_path / "here.yaml").read_text()
    cluster = open_cluster(tmp_path / "here.yaml")
    assert cluster.inside.latency_s == figures["inside"]["latency_s"] > 0
    assert cluster.inside.bandwidth_bytes_per_s == figures["inside"]["bandwidth_bytes_per_s"]
    assert figures["step_s"] > max(figures["forward_s"], figures["backward_s"]) > 0
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


@pytest.mark.timeout(400)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_the_link_between_two_hosts(tmp_path: Path, hosts: list[str]) -> None:
    for host in hosts:
        shaped = ["tbf", "rate", f"{MEGABITS}mbit", "burst", "32kb", "latency", "400ms"]
        tool("tc", "-n", host, "qdisc", "add", "dev", "cable", "root", *shaped)
    limit = MEGABITS * 1e6 / 8 * 1448 / 1514  # frames of 1,514 bytes carry 1,448 of ours
    found = []
    while not found or (not 0.7 < found[-1] / limit < 1.02 and len(found) < ATTEMPTS):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        found.append(_bandwidth(folder, hosts))
    assert 0.7 < found[-1] / limit < 1.02, (found, limit)


def _bandwidth(folder: Path, hosts: list[str]) -> float:
    """Measures the cable, in bytes/s."""
    with ending() as ranks:
        ranks += [_rank(number, host, folder) for number, host in enumerate(hosts)]
        ends = [rank.result() for rank in ranks]
    assert [end.status for end in ends] == [0, 0], ends
    figures = json.loads(ends[0].out)
    assert not ends[1].out, "rank 0 alone prints the figures"
    assert len(figures["hosts"]) == 2
    assert open_cluster(folder / "two.yaml").nic.latency_s == figures["between"]["latency_s"]
    return float(figures["between"]["bandwidth_bytes_per_s"])


def _rank(number: int, host: str, folder: Path) -> Started:
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
    return Started(command, folder, folder / f"host{number}")
