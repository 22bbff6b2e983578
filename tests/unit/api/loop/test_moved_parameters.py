"""A loop that gives its model's parameters other memory after `distribute` trains as alone, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.api.join import Group
from polyrhythm.errors import RequestError
from tolerances import REORDERED
from unit.api.alone import flat
from unit.api.loop.threads import run_in_threads

WORKERS, BATCH_SIZE = 2, 4


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)).double()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(0.2 * torch.randn(each.shape, generator=generator))
    return model


def loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(5 * WORKERS * BATCH_SIZE, 3, 6, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(images, torch.arange(len(images)) % 3), batch_size)


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def same_dtype(model: nn.Module) -> None:
    model.double().to("cpu")


def copied(model: nn.Module) -> None:
    model._apply(torch.clone)


def data(model: nn.Module) -> None:
    for each in model.parameters():
        each.data = each.data.clone()


def swapped(model: nn.Module) -> None:
    for each in model.parameters():
        torch.utils.swap_tensors(each, nn.Parameter(each.detach().clone()))


def gradients(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad = None if each.ndim == 1 else torch.zeros_like(each, memory_format=torch.preserve_format)


def moved_gradients(model: nn.Module) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.data = each.grad.data.clone()


MOVES = [channels_last, same_dtype, copied, data, swapped, gradients, moved_gradients]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, move: Callable[[nn.Module], object]
) -> None:
    for epoch in range(2):
        for step, (x, y) in enumerate(batches):
            if (epoch, step) in ((0, 0), (1, 2)):
                move(model)
            like = next(model.parameters())
            nn.functional.cross_entropy(model(x.to(like)), y.to(like.device)).backward()
            optimizer.step()
            optimizer.zero_grad()


def trained(strategy: str, optimizer: str, move: Callable[[nn.Module], object]) -> list[Tensor]:
    models = [network() for _ in range(WORKERS)]

    def loop(group: Group) -> Tensor:
        with group:
            model, own = group.distribute(models[group.rank], OPTIMIZERS[optimizer](models[group.rank]))
            train(model, own, group.shard(loader(BATCH_SIZE)), move)
        return flat(model)

    return run_in_threads(strategy, WORKERS, loop)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("synchronous", "sgd"),
        ("synchronous", "adam"),
        ("lazy_synchronous", "sgd"),
        ("parameter_server(servers=2, consistency=synchronous)", "adam"),
    ],
)
def test_other_memory_trains_as_alone(
    strategy: str, optimizer: str, move: Callable[[nn.Module], object]
) -> None:
    plain = network()
    train(plain, OPTIMIZERS[optimizer](plain), loader(WORKERS * BATCH_SIZE), move)
    expected = flat(plain)
    assert float((expected - flat(network())).abs().max()) > 0.01
    for found in trained(strategy, optimizer, move):
        torch.testing.assert_close(found, expected, **REORDERED)


@pytest.mark.parametrize("strategy", ["local_sgd(steps=2)", "sgp", "d_psgd", "parameter_server(servers=1)"])
def test_other_memory_changes_nothing_where_workers_differ(strategy: str) -> None:
    """Of one worker, whose loop is then the plain one."""
    plain, model = network(), network()
    train(plain, OPTIMIZERS["sgd"](plain), loader(BATCH_SIZE), channels_last)

    def loop(group: Group) -> None:
        with group:
            _, optimizer = group.distribute(model, OPTIMIZERS["sgd"](model))
            train(model, optimizer, group.shard(loader(BATCH_SIZE)), channels_last)

    run_in_threads(strategy, 1, loop)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **REORDERED)


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (nn.Module.float, r"0\.weight went from torch\.float64 to torch\.float32 after group\.distribute"),
        (nn.Module.half, r"0\.weight went from torch\.float64 to torch\.float16"),
        (nn.Module.bfloat16, r"0\.weight went from torch\.float64 to torch\.bfloat16"),
        (lambda model: model.to("meta"), r"0\.weight was replaced by another parameter"),
        (
            lambda model: model.load_state_dict(
                {name: value.clone() for name, value in model.state_dict().items()}, assign=True
            ),
            r"0\.weight was replaced by another parameter after group\.distribute, which would not be trained",
        ),
        (
            lambda model: setattr(model[3], "weight", nn.Parameter(model[3].weight.detach().clone())),
            r"3\.weight was replaced",
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["synchronous", "parameter_server(servers=1)", "local_sgd(steps=2)"])
def test_what_training_would_miss_is_refused(
    strategy: str, move: Callable[[nn.Module], object], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        trained(strategy, "sgd", move)


@pytest.mark.parametrize("move", [nn.Module.half, nn.Module.bfloat16])
def test_a_conversion_after_the_last_step_is_refused(move: Callable[[nn.Module], object]) -> None:
    model = network()

    def loop(group: Group) -> None:
        with group:
            _, optimizer = group.distribute(model, OPTIMIZERS["sgd"](model))
            train(model, optimizer, group.shard(loader(BATCH_SIZE)), lambda model: None)
            move(model)

    with pytest.raises(RequestError, match="convert and move the model before, or a copy of it"):
        run_in_threads("synchronous", 1, loop)
