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
    assert cluster.step_of is not None
    assert cluster.step_of.precision == "float32"
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


SCRIPT = """
import sys, torch, polyrhythm
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(64))
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.layers[0].bias.requires_grad_(False)
    def forward(self, x):
        return self.layers(x + self.token)

model = Network()
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
with polyrhythm.join("parameter_server") as group:
    model, optimizer = group.distribute(model, optimizer)
    for _ in range(int(sys.argv[2])):
        nn.functional.cross_entropy(model(torch.randn(4, 64)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
print("end of the script")
"""


def test_a_script_can_be_profiled_simulated_and_planned(tmp_path: Path) -> None:
    """Its steps are measured, and then it is ended; its sizes are those of its trained parameters."""
    (tmp_path / "train.py").write_text(SCRIPT)
    profile = ["profile", "--steps", "5", "--json"]
    own = ["--model", "sizes(file='here.yaml')", "--batch-size", "4", "--json"]
    changing = SCRIPT.replace("torch.randn(4, 64))", "torch.randn(4, 1 + _ % 2, 64)).mean(1)")
    (tmp_path / "changing.py").write_text(changing)
    some = "self.layers((x + self.token)[: 2 + next(turns)]).mean(0).expand(len(x), 10)"
    masked = "import itertools\nturns = itertools.cycle([0, 1])" + SCRIPT.replace(
        "self.layers(x + self.token)", some
    )
    (tmp_path / "masked.py").write_text(masked)
    other = [*own[:1], "sizes(file='masked.yaml')", "--batch-size", "8", "--json"]
    dry = ["simulate", "--cluster", "masked.yaml", "--gradients", "none", "--steps", "5", "--workers", "1"]
    measured, simulated, planned, short, twice, varied, unsteady, same, larger = shell(
        tmp_path,
        [*profile, "--out", "here.yaml", "train.py", "--steps", "1000000"],
        [
            "simulate",
            "--cluster",
            "here.yaml",
            "--gradients",
            "none",
            "--steps",
            "50",
            "--workers",
            "1",
            *own,
        ],
        ["plan", "--cluster", "here.yaml", "--target", "images=1e5", "--workers", "1", *own],
        [*profile, "--out", "short.yaml", "train.py", "--steps", "3"],
        [*profile, "--out", "twice.yaml", "--model", "mlp", "train.py", "--steps", "3"],
        [*profile, "--out", "varied.yaml", "changing.py", "--steps", "1000000"],
        [*profile[:2], "20", "--json", "--out", "masked.yaml", "masked.py", "--steps", "1000000"],
        [*dry, *other[:3], "4", "--json"],
        [*dry, *other],
    )
    assert "end of the script" not in measured.out
    step = open_cluster(tmp_path / "here.yaml").step_of
    assert step is not None
    assert [(each.name, each.parameters) for each in step.layers] == [
        ("", 64),
        ("layers.0", 64 * 32),
        ("layers.2", 32 * 10 + 10),
    ]
    assert all(each.seconds > 0 for each in step.layers)
    assert step.batch_size == 4
    median_s = measured.figures["step_s"]
    assert simulated.figures["images_per_s"] == pytest.approx(4 / median_s, rel=0.9)  # steps vary
    best = planned.figures["choices"][0]
    assert best["seconds"][0] == pytest.approx(1e5 / best["images_per_s"])
    assert "inputs of 2 shapes: the step time holds for this mix" in varied.err
    assert "inputs of" not in measured.err
    assert "layers.0, layers.1 and 1 more differed from step to step" in unsteady.err
    assert "layers.0, layers.1 and 1 more differed from step to step" in same.err
    assert same.figures["images_per_s"] > 0
    assert (
        "does not give that of sizes at a batch of 8 (layers.0, layers.1 and 1 more differed"
        in larger.complaint
    )
    assert "ended before it had taken" in short.complaint
    assert "--model is of a measured model" in twice.complaint
    assert not (tmp_path / "short.yaml").exists()
    assert not (tmp_path / "twice.yaml").exists()


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
