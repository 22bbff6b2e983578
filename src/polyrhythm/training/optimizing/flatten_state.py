"""An optimiser's state as named tensors and JSON-able facts, so that a checkpoint needs no pickle.

    state.<index>.<key>     a tensor of the state of parameter number <index>, counted over all groups
    facts["state"]          the state's other values, {index: {key: value}}
    facts["groups"]         what `param_groups` holds besides the parameters, one dict a group
    facts["shapes"]         of the parameters, one list a group
    facts["optimizer"]      the class's name

`Optimizer.load_state_dict` is not used to go back: it casts every floating tensor but `step` to the
parameter's dtype, which turns NAdam's float32 product of momenta into float64 and so changes the numbers of a
resumed run.
"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def pack_optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Takes an optimiser's state apart.

    Returns:
        Its tensors, live and not copied: write or copy them before the next step; and its facts.

    Raises:
        RequestError: the state holds something that is neither a tensor nor a plain value.
    """
    kind = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"state.{index}.{key}"] = value
            else:
                values.setdefault(str(index), {})[key] = _plain(value, f"{kind}'s state {key!r}")
    groups = [
        {key: _plain(value, f"{kind}'s option {key!r}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return tensors, {"optimizer": kind, "state": values, "groups": groups, "shapes": _shapes(optimizer)}


def unpack_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Puts a state back, as copies and bit for bit.

    Args:
        optimizer: of the same class and over parameters of the same shapes as the packed one; changed in
            place.
        tensors: what `pack_optimizer_state` gave.
        facts: the same; may have been through JSON.

    Raises:
        RequestError: the state is of another optimiser, or of other parameters; the optimiser is unchanged.
    """
    parameters = _parameters(optimizer)
    _check_same(optimizer, facts)
    states: list[dict[str, Any]] = [{} for _ in parameters]
    for index, values in facts["state"].items():
        states[int(index)].update(values)
    for name, value in tensors.items():
        _, index, key = name.split(".", 2)
        states[int(index)][key] = _placed(value, parameters[int(index)])
    for group, options in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update({key: _tuple(value) for key, value in options.items()})
    optimizer.state.clear()
    optimizer.state.update(
        {parameter: state for parameter, state in zip(parameters, states, strict=True) if state}
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(value: Any, where: str) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        raise RequestError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold") from None
    return value


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _check_same(optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> None:
    kind, shapes = type(optimizer).__name__, _shapes(optimizer)
    if facts["optimizer"] != kind:
        raise RequestError(
            f"the saved state is of the optimiser {facts['optimizer']}, not {kind}: resume with it"
        )
    if facts["shapes"] != shapes:
        raise RequestError(
            f"the saved {kind} state is of other parameters ({_size(facts['shapes'])}) than these "
            f"({_size(shapes)}): resume with the same model and number of servers"
        )


def _size(groups: list[list[list[int]]]) -> str:
    numbers = sum(prod(shape) for shapes in groups for shape in shapes)
    return f"{sum(map(len, groups))} tensors of {numbers} numbers"


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    # counters such as `step` stay with the program, so that reading them never waits for a GPU
    counter = value.ndim == 0 and parameter.ndim > 0
    return value.detach().to("cpu" if counter else parameter.device, copy=True)


def _tuple(value: Any) -> Any:
    # JSON has lists only; torch's options, such as `betas`, are tuples
    return tuple(value) if isinstance(value, list) else value
