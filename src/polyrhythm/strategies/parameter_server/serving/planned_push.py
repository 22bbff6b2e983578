"""A push that brings more than a gradient: the optimizer's plan of its step, and parameters that the loop has written.

    usual      [ gradient (n) ]
    planned    [ gradient (n) | length (3) | written? (1) | plan, JSON, a number per byte | parameters (n), if written ]

All of it is numbers of the gradient's dtype, so that a push is held, relayed to another server and saved as ever; every
dtype holds the numbers of bytes exactly. Only loops that users write send such pushes, in steps that need them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.communication.message import Message, Reason, RefusedMessage
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.serving.admission import admit_push
from polyrhythm.training.optimizer_plan import OptimizerPlan

_HEAD = 4


class Planned(NamedTuple):
    """Content of a push.

    Attributes:
        gradient: `(n,)`.
        plan: plan of the step; None: as at the start.
        written: `(n,)`, parameters to update in place of those that there are; None: nothing was written.
    """

    gradient: Tensor
    plan: OptimizerPlan | None = None
    written: Tensor | None = None


def packed_push(planned: Planned) -> Tensor:
    """Pack what a push brings into one tensor; it is the gradient where it brings nothing else."""
    gradient, plan, written = planned
    if plan is None and written is None:
        return gradient
    text = b"" if plan is None else json.dumps(plan.to_json(), separators=(",", ":")).encode()
    numbers = [*len(text).to_bytes(3, "big"), int(written is not None), *text]
    parts = [gradient, gradient.new_tensor(numbers)]
    return torch.cat(parts if written is None else [*parts, written])


def unpacked_push(tensor: Tensor, size: int) -> Planned:
    """Read the result of `packed_push`.

    Args:
        tensor: payload of the push.
        size: numbers of the gradient.

    Raises:
        RefusedMessage: it is something else.
    """
    if len(tensor) == size:
        return Planned(tensor)
    head = tensor[size : size + _HEAD].tolist()
    if len(head) < _HEAD or not all(number in range(256) for number in head):
        raise _refused(tensor, size)
    length, written = int.from_bytes(bytes(map(int, head[:3])), "big"), head[3] == 1
    end = size + _HEAD + length
    if len(tensor) != end + size * written:
        raise _refused(tensor, size)
    letters = tensor[size + _HEAD : end].tolist()
    if not all(number in range(256) for number in letters):
        raise _refused(tensor, size)
    plan = _plan(bytes(map(int, letters))) if length else None
    if plan is not None and plan.spans and plan.spans[-1].stop > size:
        raise _refused(tensor, size)
    return Planned(tensor[:size], plan, tensor[end:] if written else None)


def admit_planned_push(message: Message, values: Tensor, version: int, step: int) -> None:
    """Raise `RefusedMessage` as `admit_push` does, but allow a plan and parameters with the gradient."""
    try:
        admit_push(message, values, version, step)
    except RefusedMessage:
        tensor, size = message.tensor, values.numel()
        if tensor is None or not tensor.numel() > size > 0 or tensor.dtype is not values.dtype:
            raise
        admit_push(message._replace(tensor=unpacked_push(tensor, size).gradient), values, version, step)


def common_plan(pushes: Sequence[Planned], weights: Sequence[float]) -> OptimizerPlan | None:
    """Return the plan of an update with several gradients: what has a gradient in one of them has one in it.

    Args:
        pushes: pushed gradients.
        weights: weights of each; one without weight is ignored.
    """
    weighty = [push.plan for push, weight in zip(pushes, weights, strict=True) if weight > 0]
    plans = [plan for plan in weighty if plan is not None]
    if not plans or len(plans) < len(weighty):
        return None
    return plans[0] if len(plans) == 1 else plans[0].united(plans[1:])


@lru_cache(maxsize=64)
def _plan(text: bytes) -> OptimizerPlan:
    try:
        return OptimizerPlan.from_json(json.loads(text))
    except (RequestError, ValueError, TypeError, RecursionError) as error:
        raise RefusedMessage(
            Reason.MALFORMED, f"a gradient arrived with no plan of its step: {error}"
        ) from None


def _refused(tensor: Tensor, size: int) -> RefusedMessage:
    text = f"a gradient of {tensor.numel()} numbers, {tensor.dtype}, arrived for {size} parameters, {tensor.dtype}"
    return RefusedMessage(Reason.PAYLOAD, text)
