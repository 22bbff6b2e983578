"""Optimizers' states over slices of a vector, cut into other slices; and the mean of several states.

Cut again:

    before   |---- 0 ----|---- 1 ----|        per number (momenta): each keeps its own, bit for bit
    after    |--- 0 ---|-- 1 --|- 2 -|        per slice (counters): the largest of those that are touched

The mean of states of one plan each, as if one optimizer had made the mean of their models:

    per number (momenta, mean squares)      the weighted mean; zeros for an optimizer that has none yet
    else (Adam's step, a basis)             the first one's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.training.flat_optimizer import Packed, Span
from polyrhythm.training.optimizer_plan import OptimizerPlan


def recut_optimizer(
    packed: Sequence[Packed], plan: OptimizerPlan, before: Sequence[slice], after: slice
) -> Packed:
    """Return the state of the optimizer of one new slice.

    Args:
        packed: results of `pack_optimizer_state` for every old slice.
        plan: plan of the whole vector.
        before: the old slices, which together are the whole vector.
        after: the new one.
    """
    old = [
        _Piece(Span(cut.start + span.start, cut.start + span.stop, span.options), index, *packed[number])
        for number, cut in enumerate(before)
        for index, span in enumerate(plan.part(cut.start, cut.stop).spans)
    ]
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups, shapes = [], []
    kind = ""
    for index, span in enumerate(plan.part(after.start, after.stop).spans):
        whole = Span(after.start + span.start, after.start + span.stop, span.options)
        touched = [piece for piece in old if piece.span.start < whole.stop and piece.span.stop > whole.start]
        kind = touched[0].facts["optimizer"]
        for key in dict.fromkeys(key for piece in touched for key in piece.tensors):
            tensors[f"state.{index}.{key}"] = _joined(key, touched, whole)
        for key in dict.fromkeys(key for piece in touched for key in piece.values):
            found = [piece.values[key] for piece in touched if key in piece.values]
            values.setdefault(str(index), {})[key] = max(found, key=_size)
        groups.append(touched[0].options)
        shapes.append([[whole.stop - whole.start]])
    if not groups:
        return {}, {}
    return tensors, {"optimizer": kind, "state": values, "groups": groups, "shapes": shapes}


class _Piece:
    """Kept state of one span of the whole vector."""

    def __init__(self, span: Span, index: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        prefix = f"state.{index}."
        self.span = span
        self.facts = facts
        self.tensors = {
            name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
        }
        self.values: dict[str, Any] = facts["state"].get(str(index), {})
        self.options: dict[str, Any] = facts["groups"][index]


def _joined(key: str, touched: Sequence[_Piece], whole: Span) -> Tensor:
    """Return one tensor of a new span; where an old one had none yet, there are zeros, as such state begins."""
    found = [(piece, piece.tensors[key]) for piece in touched if key in piece.tensors]
    first = found[0][1]
    if first.ndim == 0:
        return max((tensor for _, tensor in found), key=float).clone()
    joined = torch.zeros(whole.stop - whole.start, dtype=first.dtype)
    for piece, tensor in found:
        start, stop = max(piece.span.start, whole.start), min(piece.span.stop, whole.stop)
        joined[start - whole.start : stop - whole.start] = tensor[
            start - piece.span.start : stop - piece.span.start
        ]
    return joined


def _size(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def mean_optimizer(packed: Sequence[Packed], weights: Sequence[float]) -> Packed:
    """Return the mean of optimizers' states.

    Args:
        packed: results of `pack_optimizer_state` for every optimizer; at least one.
        weights: weights of each; they are not all 0.
    """
    fullest = max(packed, key=lambda entry: len(entry[0]))
    tensors = {}
    for name, like in fullest[0].items():
        found = [each.get(name) for each, _ in packed]
        first = next(value for value in found if value is not None)
        tensors[name] = (
            weighted_mean(found, weights, like) if _is_per_number(name, like, fullest[1]) else first
        )
    return tensors, fullest[1] if fullest[0] else packed[0][1]


def weighted_mean(values: Sequence[Tensor | None], weights: Sequence[float], like: Tensor) -> Tensor:
    """Return the weighted mean of tensors like one of them; None counts as zeros."""
    total = torch.zeros_like(like)
    for value, weight in zip(values, weights, strict=True):
        if value is not None:
            total.add_(value, alpha=weight)
    return total.div_(sum(weights))


def _is_per_number(name: str, value: Tensor, facts: dict[str, Any]) -> bool:
    if value.ndim == 0 or not value.is_floating_point():
        return False
    shapes = [shape for group in facts.get("shapes", []) for shape in group]
    return list(value.shape) in shapes
