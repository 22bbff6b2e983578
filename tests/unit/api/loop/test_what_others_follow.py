"""What workers that do not hold one model follow of a loop: options, missing gradients, writes, objects."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from conformance.jobs import is_plain_alone
from polyrhythm.api.join import Group
from polyrhythm.errors import RequestError
from tolerances import REORDERED
from unit.api.loop.threads import run_in_threads
from unit.api.loop.variations import SignMomentum

FREE = ["parameter_server(servers=2)", "hierarchical(consistency=asynchronous)", "mixed(replicas=1)"]
PUSHING = [*FREE, "ssp", "sgp", "ad_psgd", "hogwild"]
OWN_MODEL = [
    "local_sgd(steps=2)",
    "post_local_sgd(after=3, steps=2)",
    "d_psgd",
    "mixed(inside=local_sgd(steps=2))",
]


def drawn() -> tuple[nn.Module, torch.Generator]:
    """Make a network from a generator of its own: that of torch is also used by other threads."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(0.5 * torch.randn(each.shape, generator=generator))
    return model, generator


def alike(group: Group, change: Any, make: Any = None) -> list[Tensor]:
    """Take 6 steps, on batches that all workers have alike; return the parameters after each, and in the end."""
    model, generator = drawn()
    optimizer = (
        make(model) if make else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    )
    states = []
    with group:
        model, optimizer = group.distribute(model, optimizer)
        for step in range(6):
            change(model, optimizer, step, "before")
            nn.functional.cross_entropy(
                model(torch.randn(6, 4, generator=generator).double()), torch.arange(6) % 3
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
            change(model, optimizer, step, "after")
            states.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    states.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return states


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(change: Any, make: Any = None) -> list[Tensor]:
    model, generator = drawn()
    optimizer = (
        make(model) if make else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    )
    states = []
    for step in range(6):
        change(model, optimizer, step, "before")
        nn.functional.cross_entropy(
            model(torch.randn(6, 4, generator=generator).double()), torch.arange(6) % 3
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model, optimizer, step, "after")
        states.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return states


def schedules(model: nn.Module, optimizer: Any, step: int, when: str) -> None:
    """What OneCycleLR and schedules of decay do."""
    if when == "after":
        optimizer.param_groups[0].update(
            lr=0.05 * (step + 1), momentum=0.95 - 0.1 * step, weight_decay=0.02 * step
        )


def freezes(model: Any, optimizer: Any, step: int, when: str) -> None:
    if when == "before":
        model[0].requires_grad_(step not in (2, 3))


def clamps(model: nn.Module, optimizer: Any, step: int, when: str) -> None:
    if when == "after":
        for each in model.parameters():
            each.data.clamp_(-0.2, 0.2)


def nothing(model: nn.Module, optimizer: Any, step: int, when: str) -> None:
    pass


@pytest.mark.parametrize("change", [schedules, freezes])
@pytest.mark.parametrize("strategy", [*PUSHING, *OWN_MODEL])
def test_a_single_worker_is_the_plain_loop(strategy: str, change: Any) -> None:
    """Of one worker nothing is stale: with it, all that pushes must do what plain torch does."""
    found = run_in_threads(strategy, 1, lambda group: alike(group, change))[0]
    if is_plain_alone(strategy):
        assert torch.equal(found[-1], plain(change)[-1])
    else:
        torch.testing.assert_close(found[-1], plain(change)[-1], **REORDERED)


@pytest.mark.parametrize(
    "strategy", ["sgp", "ad_psgd", "local_sgd(steps=2)", "d_psgd", "easgd", "post_local_sgd(after=3)"]
)
def test_workers_with_models_of_their_own_keep_what_the_loop_writes(strategy: str) -> None:
    for states in run_in_threads(strategy, 2, lambda group: alike(group, clamps)):
        assert all(float(state.abs().max()) <= 0.2 for state in states[:-1])
        assert all(bool((before != after).any()) for before, after in pairwise(states[:-1]))


@pytest.mark.parametrize("strategy", [*FREE, "hogwild", "downpour", "softsync"])
def test_servers_that_run_freely_refuse_what_the_loop_writes(strategy: str) -> None:
    with pytest.raises(
        RequestError, match=r"^parameters were changed after optimizer\.step\(\), which .* overwrite"
    ):
        run_in_threads(strategy, 2, lambda group: alike(group, clamps))


@pytest.mark.parametrize("strategy", OWN_MODEL)
def test_an_optimizer_that_nobody_knows_runs_where_a_worker_holds_its_model(strategy: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return SignMomentum(model.parameters(), 0.1)

    found = run_in_threads(strategy, 1, lambda group: alike(group, nothing, make))[0]
    torch.testing.assert_close(found[-1], plain(nothing, make)[-1], **REORDERED)


@pytest.mark.parametrize(
    "strategy", ["hogwild", "parameter_server", "downpour", "gaia", "eamsgd", "sandblaster", "mixed", "sgp"]
)
def test_nothing_that_others_do_passes_for_a_write(strategy: str) -> None:
    networks = [network() for _ in range(2)]

    def loop(group: Group) -> int:
        with group:
            model, optimizer = group.distribute(*networks[group.rank])
            shard = group.shard(
                DataLoader(TensorDataset(torch.randn(24, 4).double(), torch.arange(24) % 3), 4)
            )
            for _ in range(3):
                for x, y in shard:
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                optimizer.settle()
        return optimizer.steps

    assert run_in_threads(strategy, 2, loop) == [9, 9]


def test_an_elastic_worker_runs_it_too() -> None:
    first = run_in_threads("easgd", 1, lambda group: alike(group, schedules))[0]
    again = run_in_threads("easgd", 1, lambda group: alike(group, nothing))[0]
    assert not torch.equal(first[-1], again[-1])  # options are followed
