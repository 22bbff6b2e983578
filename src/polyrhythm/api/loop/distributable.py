"""Which models and optimizers a user's loop can distribute: what cannot be is refused before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.errors import RequestError


def check_distributable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reject a model or an optimizer that cannot be distributed; each message has a remedy.

    Args:
        model: model of a user's loop.
        optimizer: optimizer of the user's loop.

    Raises:
        RequestError: the model or the optimizer cannot be distributed.
    """
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"a group distributes an nn.Module (given {type(model).__name__}): put several into an nn.ModuleList"
        )
    if isinstance(model, DistributedDataParallel):
        raise RequestError(
            "the model is wrapped in DistributedDataParallel, which averages gradients itself: give the model inside"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise RequestError(
            "a ScriptModule takes no hooks: distribute the model before torch.jit, or use torch.compile"
        )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise RequestError("the model has no parameter to train: let at least one require a gradient")
    first = next(iter(parameters.values()))
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, first.device)
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise RequestError("SparseAdam needs sparse gradients, which are dense here: use Adam")
    for number, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            raise RequestError(
                f"param group {number} of {kind} has no lr, which strategies and schedulers need: name its rate so"
            )


def _check_parameter(name: str, parameter: Tensor, device: torch.device) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise RequestError(
            f"{name} has no shape yet: run a batch through the model before group.distribute, as lazy modules ask for"
        )
    kind = type(parameter.data)
    if kind is not Tensor:
        raise RequestError(
            f"{name} is a {kind.__name__}, which others than its own library cannot exchange: use plain "
            "tensors"
        )
    if parameter.is_meta:
        raise RequestError(
            f"{name} is on the meta device, without numbers: model.to_empty(device=...) and initialize it before"
        )
    if parameter.device != device:
        raise RequestError(
            f"the model is on several devices, {device} and {parameter.device} ({name}): move it to one, or train with "
            "polyrhythm.train and a strategy that cuts it, such as pipeline"
        )
    if parameter.is_complex() and parameter.requires_grad:
        raise RequestError(
            f"{name} is complex, which strategies cannot average: keep it as two real numbers, torch.view_as_real"
        )
