"""Models and optimizers that cannot be distributed are refused in one line, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.api.join import join
from polyrhythm.errors import RequestError


class NoRate(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"eta": 0.1})


class Identity(nn.Module):
    pass


class Weights(nn.Module):
    def __init__(self, *weights: nn.Parameter) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)


class Wrapped(torch.Tensor):
    """As a tensor of a quantization library, or of torch's tensor parallelism."""


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters()) or [nn.Parameter(torch.zeros(1))], lr=0.1)


def unrelated(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def wrapped() -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.randn(3, 4).as_subclass(Wrapped))
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize(
    ("make", "optimize", "words"),
    [
        (lambda: lambda x: x, unrelated, r"a group distributes an nn\.Module \(given function\)"),
        (lambda: [nn.Linear(4, 3)], unrelated, r"\(given list\): put several into an nn\.ModuleList"),
        (Identity, sgd, "the model has no parameter to train"),
        (lambda: nn.Linear(4, 3).requires_grad_(False), sgd, "the model has no parameter to train"),
        (lambda: nn.LazyLinear(3), sgd, "weight has no shape yet: run a batch through the model"),
        (lambda: nn.Linear(4, 3, device="meta"), sgd, "weight is on the meta device, without numbers"),
        (
            lambda: Weights(nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.cfloat))),
            sgd,
            r"weights\.1 is complex, .* torch\.view_as_real",
        ),
        (
            lambda: Weights(nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))),
            sgd,
            r"weights\.1 is on the meta device",
        ),
        (wrapped, sgd, r"weight is a Wrapped, .* use plain tensors"),
        (lambda: torch.jit.script(nn.Linear(4, 3)), sgd, "a ScriptModule takes no hooks"),
        (
            lambda: nn.Linear(4, 3),
            lambda model: NoRate(model.parameters()),
            "param group 0 of NoRate has no lr",
        ),
        (
            lambda: nn.Embedding(4, 3, sparse=True),
            lambda model: torch.optim.SparseAdam(list(model.parameters())),
            "SparseAdam needs sparse gradients, which are dense here: use Adam",
        ),
        (lambda: nn.Linear(4, 3), unrelated, "trains a parameter that the model does not have"),
        (lambda: nn.Linear(4, 3), lambda model: [sgd(model)], r"one optimizer \(given list\)"),
    ],
)
def test_each_is_refused_in_one_line(
    make: Callable[[], Any], optimize: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "POLYRHYTHM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    model = make()
    with pytest.raises(RequestError, match=words) as error, join() as group:
        group.distribute(model, optimize(model))
    assert "\n" not in str(error.value)
