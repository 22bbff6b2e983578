"""Optimizers with more than `step`: modes, two steps, rates that are tensors, and param groups that come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from polyrhythm.errors import RequestError
from tolerances import REORDERED
from unit.api.alone import flat
from unit.api.loop.loops import BATCH_SIZE, EPOCHS, Network, loader
from unit.api.loop.threads import run_in_threads

Train = Callable[[Network, Any, Any], None]
Make = Callable[[Network], torch.optim.Optimizer]


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Defazio et al., The Road Less Scheduled, 2024: parameters are y in training and x in tests, in place."""

    def __init__(self, parameters: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for each in group["params"]:
                    if "z" in self.state[each]:
                        each.lerp_(self.state[each]["z"], 1 - (group["beta"] if mode else 1 / group["beta"]))
                group["train_mode"] = mode

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            share = 1 / (group["k"] + 1)
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, share).add_(each.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(each.grad, alpha=group["lr"])
            group["k"] += 1


class SAM(torch.optim.Optimizer):
    """Foret et al., Sharpness-Aware Minimization, 2021, as the public implementation in two steps has it."""

    def __init__(self, parameters: Any, lr: float, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        trained = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in trained]).norm()
        for each in trained:
            self.state[each]["old"] = each.detach().clone()
            each.add_(each.grad, alpha=self.param_groups[0]["rho"] / float(norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if "old" in self.state[each]:
                    each.copy_(self.state[each]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def loss_of(model: Network, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def without_schedule(model: Network, optimizer: Any, batches: Any) -> None:
    for _ in range(EPOCHS):
        optimizer.train()
        for x, y in batches:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()


def sharpness_aware(model: Network, optimizer: Any, batches: Any) -> None:
    for _ in range(EPOCHS):
        for x, y in batches:
            loss_of(model, x, y).backward()
            optimizer.first_step(zero_grad=True)
            loss_of(model, x, y).backward()
            optimizer.second_step(zero_grad=True)


def unfreezes(model: Network, optimizer: Any, batches: Any) -> None:
    """Trains the head alone, then the branch as well, then all."""
    for epoch in range(EPOCHS):
        part = {1: model.branch, 2: model.trunk}.get(epoch)
        if part is not None:
            part.requires_grad_(True)
            optimizer.add_param_group({"params": part.parameters(), "lr": 0.05 / epoch})
        for x, y in batches:
            loss_of(model, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def adds(model: Network, optimizer: Any, batches: Any) -> None:
    """Trains parameters that the optimizer did not know, and that were never frozen, from epoch 1 on."""
    for epoch in range(EPOCHS):
        if epoch == 1:
            optimizer.add_param_group({"params": [*model.branch.parameters(), *model.trunk.parameters()]})
        for x, y in batches:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()


def plainly(model: Network, optimizer: Any, batches: Any) -> None:
    for _ in range(EPOCHS):
        for x, y in batches:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()


def head_of(model: Network, frozen: bool = True) -> torch.optim.Optimizer:
    for part in (model.trunk, model.branch):
        part.requires_grad_(not frozen)
    return torch.optim.SGD(model.head.parameters(), lr=0.2, momentum=0.9)


def plain(train: Train, make: Make, workers: int) -> Tensor:
    model = Network()
    train(model, make(model), loader(BATCH_SIZE * workers, workers))
    return flat(model)


def trained(strategy: str, workers: int, train: Train, make: Make) -> list[tuple[Tensor, int]]:
    models = [Network() for _ in range(workers)]

    def loop(group: Group) -> tuple[Tensor, int]:
        model = models[group.rank]
        with group:
            model, optimizer = group.distribute(model, make(model))
            train(model, optimizer, group.shard(loader(BATCH_SIZE, workers)))
        return flat(model), optimizer.steps

    return run_in_threads(strategy, workers, loop)


AS_ALONE: list[tuple[Train, Make]] = [
    (without_schedule, lambda model: ScheduleFreeSGD(model.parameters(), lr=0.2)),
    (sharpness_aware, lambda model: SAM(model.parameters(), lr=0.1)),
    (unfreezes, head_of),
    (adds, lambda model: head_of(model, frozen=False)),
    (plainly, lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))),
]


@pytest.mark.parametrize(("train", "make"), AS_ALONE)
@pytest.mark.parametrize(("strategy", "workers"), [("synchronous", 2), ("lazy_synchronous", 3)])
def test_synchronous_workers_train_as_alone(strategy: str, workers: int, train: Train, make: Make) -> None:
    expected = plain(train, make, workers)
    found = trained(strategy, workers, train, make)
    for vector, steps in found:
        torch.testing.assert_close(vector, expected, **REORDERED)
        assert steps == EPOCHS * 4
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize(
    ("train", "make"), [each for each in AS_ALONE if each[0] is not unfreezes and each[0] is not adds]
)
def test_local_updates_of_one_worker_are_the_plain_loop(train: Train, make: Make) -> None:
    ((vector, _),) = trained("local_sgd(steps=2)", 1, train, make)
    torch.testing.assert_close(vector, plain(train, make, 1), **REORDERED)


@pytest.mark.parametrize("train", [without_schedule, sharpness_aware])
def test_local_updates_exchange_what_such_an_optimizer_has_done(train: Train) -> None:
    make = next(make for each, make in AS_ALONE if each is train)
    (first, steps), (second, _) = trained("local_sgd(steps=2)", 2, train, make)
    assert torch.equal(first, second)
    assert steps == EPOCHS * 4


@pytest.mark.parametrize(
    "strategy",
    ["parameter_server(servers=2, consistency=synchronous)", "mixed(replicas=1, consistency=synchronous)"],
)
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_servers_take_a_rate_that_is_a_tensor(strategy: str, kind: str) -> None:
    def make(model: Network) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(
            model.parameters(), lr=torch.tensor(0.05, dtype=torch.float64), weight_decay=0.01
        )

    expected = plain(plainly, make, 2)
    for vector, _ in trained(strategy, 2, plainly, make):
        torch.testing.assert_close(vector, expected, **REORDERED)


def test_servers_train_what_was_never_frozen_once_it_is_added() -> None:
    strategy = "parameter_server(servers=2, consistency=synchronous)"
    expected = plain(adds, lambda model: head_of(model, frozen=False), 2)
    for vector, _ in trained(strategy, 2, adds, lambda model: head_of(model, frozen=False)):
        torch.testing.assert_close(vector, expected, **REORDERED)


@pytest.mark.parametrize(
    "strategy", ["parameter_server(servers=1)", "local_sgd(steps=2)", "d_psgd", "downpour"]
)
def test_what_cannot_grow_says_how_to_thaw(strategy: str) -> None:
    with pytest.raises(
        RequestError, match=r"^add_param_group: .* give it these parameters before, frozen by"
    ):
        trained(strategy, 2, unfreezes, head_of)


def test_workers_that_add_different_parameters_are_refused() -> None:
    def different(model: Network, optimizer: Any, batches: Any) -> None:
        plainly(model, optimizer, batches)
        part = next(parts)
        part(model).requires_grad_(True)
        optimizer.add_param_group({"params": part(model).parameters()})

    parts = iter([lambda model: model.branch, lambda model: model.trunk])
    with pytest.raises(RequestError, match="workers add different parameters: give all the same"):
        trained("synchronous", 2, different, head_of)


def test_an_attribute_that_nobody_has_is_named() -> None:
    def asks(model: Network, optimizer: Any, batches: Any) -> None:
        assert not hasattr(optimizer, "first_step")
        optimizer.no_such_thing()

    with pytest.raises(AttributeError, match=r"'SGD' object has no attribute 'no_such_thing'"):
        trained("synchronous", 1, asks, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
