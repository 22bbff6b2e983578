"""A push that brings the plan of its step, and parameters that a loop has written: packed, read, and refused."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.planned_push import (
    Planned,
    admit_planned_push,
    common_plan,
    packed_push,
    unpacked_push,
)
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan


def plan(*spans: tuple[int, int, float]) -> OptimizerPlan:
    return OptimizerPlan(
        "SGD", tuple(Span(a, b, {"lr": rate, "momentum": 0.5}) for a, b, rate in spans), 0.25
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("written", [None, [5.0, 6.0, 7.0]])
@pytest.mark.parametrize("planned", [None, plan((0, 1, 0.25), (2, 3, 0.125))])
def test_what_is_packed_is_read(
    dtype: torch.dtype, written: list[float] | None, planned: OptimizerPlan | None
) -> None:
    gradient = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    values = None if written is None else torch.tensor(written, dtype=dtype)
    found = unpacked_push(packed_push(Planned(gradient, planned, values)), 3)
    assert torch.equal(found.gradient, gradient)
    assert found.plan == planned
    assert (found.written is None) == (values is None)
    if values is not None and found.written is not None:
        assert torch.equal(found.written, values)


def test_a_gradient_alone_travels_as_it_is() -> None:
    gradient = torch.ones(3)
    assert packed_push(Planned(gradient)) is gradient


WHOLE = packed_push(Planned(torch.ones(3), plan((0, 3, 0.25))))


@pytest.mark.parametrize(
    "payload",
    [
        torch.ones(4),
        torch.ones(9),
        WHOLE[:-1],
        torch.cat([WHOLE, torch.ones(1)]),
        torch.cat([WHOLE[:-2], torch.tensor([0.5, 1.0])]),
        torch.cat([WHOLE[:-2], torch.tensor([float("nan"), 1.0])]),
        torch.cat([WHOLE[:-2], torch.tensor([300.0, 1.0])]),
        torch.cat([WHOLE[:8], torch.full_like(WHOLE[8:], 65.0)]),
        packed_push(Planned(torch.ones(3), plan((0, 4, 0.25)))),
        packed_push(Planned(torch.ones(3), plan((2, 3, 0.25), (0, 1, 0.25)))),
        packed_push(Planned(torch.ones(3), plan((0, 3, -1.0)))),
        packed_push(Planned(torch.ones(3), OptimizerPlan("Muon", (), 0.1))),
    ],
)
def test_anything_else_is_refused(payload: torch.Tensor) -> None:
    with pytest.raises(RefusedMessage):
        admit_planned_push(Message(Kind.PUSH, payload), torch.zeros(3), 0, 0)


def test_a_parameter_has_a_gradient_if_one_push_has_one_for_it() -> None:
    pushes = [
        Planned(torch.ones(6), plan((0, 2, 0.1))),
        Planned(torch.ones(6), plan((1, 3, 0.1), (5, 6, 0.1))),
    ]
    found = common_plan(pushes, [1.0, 0.5])
    assert found is not None
    assert [(span.start, span.stop) for span in found.spans] == [(0, 3), (5, 6)]
    assert common_plan(pushes, [1.0, 0.0]) == pushes[0].plan
    assert common_plan([*pushes, Planned(torch.ones(6))], [1.0, 1.0, 1.0]) is None
    assert common_plan([*pushes, Planned(torch.ones(6))], [1.0, 1.0, 0.0]) is not None
