"""A loop of one's own that goes on from what it has saved, with what its servers held."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import polyrhythm
from conformance.rank_processes import RankProcesses, Seat
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK
from polyrhythm.launch.script import WORKERS_VARIABLE
from polyrhythm.training.flat_optimizer import make_optimizers_quickly

STRATEGY = "parameter_server(servers=2, replicas=2, consistency=synchronous)"
WORKERS, SERVERS, HALF, WHOLE = 2, 2, 3, 6


def _as_a_script(seat: Seat, folder: Path, first: int, last: int) -> None:
    """Takes the steps `first` to `last` in the surroundings that `polyrhythm run` gives a rank, saving after each."""
    size = WORKERS if seat.rank < WORKERS else seat.size
    ours = {"RANK": seat.rank, "WORLD_SIZE": size, WORKERS_VARIABLE: WORKERS}
    store = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": seat.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({key: str(value) for key, value in (ours | store).items()})
    make_optimizers_quickly()
    torch.manual_seed(2)
    model = nn.Linear(6, 3).double()
    with polyrhythm.join(STRATEGY) as group:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, distributed = group.distribute(model, optimizer)
        if first:
            found = torch.load(folder / f"step-{first}-{group.rank}.pt", weights_only=True)
            model.load_state_dict(found["model"])
            distributed.load_state_dict(found["optimizer"])
        for step in range(first, last):
            torch.manual_seed(100 * step + group.rank)
            nn.functional.cross_entropy(model(torch.randn(4, 6).double()), torch.arange(4) % 3).backward()
            distributed.step()
            state = {"model": model.state_dict(), "optimizer": distributed.state_dict()}
            torch.save(state, folder / f"step-{step + 1}-{group.rank}.pt")


def run(folder: Path, first: int, last: int) -> None:
    with RankProcesses(_as_a_script, WORKERS + SERVERS, folder, first, last) as ranks:
        ranks.wait_for_end(range(WORKERS + SERVERS))


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
