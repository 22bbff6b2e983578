"""A loop of one's own that goes on from what it has saved, with what its servers held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from multiprocess import resumed_loop_task
from polyrhythm.launch.script import run_script

STRATEGY = "parameter_server(servers=2, replicas=2, consistency=synchronous)"
WORKERS, SERVERS, HALF, WHOLE = 2, 2, 3, 6


def run(folder: Path, first: int, last: int) -> None:
    arguments = [STRATEGY, str(folder), str(first), str(last)]
    run_script(resumed_loop_task.__file__, arguments, workers=WORKERS)


def saved(folder: Path, step: int) -> list[dict[str, Any]]:
    paths = [folder / f"step-{step}-{worker}.pt" for worker in range(WORKERS)]
    return [torch.load(path, weights_only=True) for path in paths]


def test_servers_go_on_with_their_momenta(tmp_path: Path) -> None:
    run(tmp_path, 0, WHOLE)
    whole = saved(tmp_path, WHOLE)
    states = saved(tmp_path, HALF)[0]["optimizer"]["servers"]
    momenta = [state["tensors"]["optimizer.state.0.momentum_buffer"] for state in states]
    assert [len(momentum) for momentum in momenta] == [10, 11]
    assert all(momentum.abs().min() > 0 for momentum in momenta)
    assert saved(tmp_path, HALF)[1]["optimizer"]["servers"] == []  # the leader's has them
    for path in tmp_path.glob(f"step-{WHOLE}-*.pt"):
        path.unlink()
    run(tmp_path, HALF, WHOLE)
    for before, after in zip(whole, saved(tmp_path, WHOLE), strict=True):
        assert after["optimizer"]["steps"] == WHOLE
        for name, value in before["model"].items():
            assert torch.equal(value, after["model"][name]), name
