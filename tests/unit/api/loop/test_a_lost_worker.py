"""A worker of a user's loop is lost: the others go on as plain torch does with what those have who are there."""

from __future__ import annotations

from queue import Queue
from threading import Thread, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from tolerances import REORDERED
from unit.api.loop import threads
from unit.api.loop.test_uneven_inputs import batch
from unit.api.loop.threads import Killed, run_in_threads

WORKERS, STEPS = 3, 6


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, workers: list[int], step: int) -> None:
    x, y = (torch.cat(parts) for parts in zip(*(batch(0, worker, step) for worker in workers), strict=True))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def mortal(group: Group, network: tuple[nn.Module, torch.optim.Optimizer], victim: int, at: int) -> Tensor:
    with group:
        model, optimizer = group.distribute(*network)
        for step in range(STEPS):
            if (group.rank, step) == (victim, at):
                raise Killed
            steps(model, optimizer, [group.rank], step)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    "strategy",
    ["synchronous", "local_sgd(steps=1)", "post_local_sgd(after=100)", "post_local_sgd(after=2, steps=1)"],
)
@pytest.mark.parametrize(("victim", "at"), [(1, 0), (2, 3)])
def test_the_others_take_its_steps_without_it(victim: int, at: int, strategy: str) -> None:
    networks = [made() for _ in range(WORKERS)]
    found = run_in_threads(strategy, WORKERS, lambda group: mortal(group, networks[group.rank], victim, at))
    check_alike(found, victim, at)


@pytest.mark.parametrize("strategy", ["synchronous", "local_sgd(steps=1)"])
def test_workers_that_join_after_a_loss_learn_of_it(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = [made() for _ in range(WORKERS)]
    victims: Queue[Thread] = Queue()
    connect = threads.connect

    def connect_late(rendezvous: Any, **options: Any) -> Any:
        joined = connect(rendezvous, **options)
        if rendezvous.rank != 1:
            victims.get().join()
        return joined

    def loop(group: Group) -> Tensor:
        if group.rank == 1:
            for _ in range(WORKERS - 1):
                victims.put(current_thread())
        return mortal(group, networks[group.rank], 1, 0)

    monkeypatch.setattr(threads, "connect", connect_late)
    check_alike(run_in_threads(strategy, WORKERS, loop), 1, 0)


def check_alike(found: list[Tensor], victim: int, at: int) -> None:
    """Compare with plain torch over the batches of the workers that are there at each step."""
    plain = made()
    for step in range(STEPS):
        there = [worker for worker in range(WORKERS) if worker != victim or step < at]
        steps(*plain, there, step)
    expected = nn.utils.parameters_to_vector(plain[0].parameters()).detach()
    for worker, vector in enumerate(found):
        if worker != victim:
            torch.testing.assert_close(vector, expected, **REORDERED)
