"""A backward pass in two parts: gradients of inputs first, those of weights later.

    y = f(x, W)    B:  dx = df/dx' dy       W:  dW += df/dW' dy        of fully connected and convolution layers

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241. What other layers have by way of
weights, such as the scales of a norm, is little, and computed with their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Finish = Callable[[], None]


class DeferredWeights(TorchFunctionMode):
    """Inside, layers are computed such that their backward pass leaves the gradients of weights to `finish`."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[Finish] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if not (_is_trained(*args[1:2]) and not options):
            return func(*args, **options)
        if func is functional.linear:
            return _layer(_Linear, *args[:2], args[2] if len(args) > 2 else None, self._left)
        if func in (torch.conv1d, torch.conv2d, torch.conv3d):
            given = [*args, *_DEFAULTS[len(args) - 2 :]]
            sizes = [_sizes(each, args[1].ndim - 2) for each in given[3:6]]
            if all(sizes):
                return _layer(_Convolution, *given[:3], sizes, given[6], self._left)
        return func(*args, **options)

    def finish(self) -> None:
        """Add the gradients of weights that were left."""
        with torch.no_grad():
            for add in self._left:
                add()
        self._left.clear()


_DEFAULTS = (None, 1, 0, 1, 1)
"""Bias, stride, padding, dilation and groups of a convolution."""


def _is_trained(*weights: Any) -> bool:
    return (
        bool(weights) and isinstance(weights[0], Tensor) and weights[0].is_leaf and weights[0].requires_grad
    )


def _sizes(size: Any, dimensions: int) -> list[int]:
    """Return a size for each dimension; none where it is given as a word."""
    if isinstance(size, str):
        return []
    return [size] * dimensions if isinstance(size, int) else list(size)


def _layer(kind: Any, *arguments: Any) -> Any:
    return kind.apply(*arguments)


def _add(parameter: Tensor | None, gradient: Tensor | None) -> None:
    if parameter is None or gradient is None or not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, left: list[Finish]) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.left = left
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors

        def finish() -> None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            _add(weight, rows.t().mm(x.reshape(-1, x.shape[-1])))
            _add(bias, rows.sum(0))

        ctx.left.append(finish)
        inputs = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        return inputs, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sizes: list[list[int]],
        groups: int,
        left: list[Finish],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how = (*sizes, False, [0] * (weight.ndim - 2), groups)
        ctx.left = left
        stride, padding, dilation = sizes
        outputs: Tensor = torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, *ctx.how[3:])
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        biases = None if bias is None else list(bias.shape)
        how = ctx.how

        def part(mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(gradient, x, weight, biases, *how, mask)

        def finish() -> None:
            _, of_weight, of_bias = part(
                [False, weight.requires_grad, bias is not None and bias.requires_grad]
            )
            _add(weight, of_weight)
            _add(bias, of_bias)

        ctx.left.append(finish)
        inputs = part([True, False, False])[0] if ctx.needs_input_grad[0] else None
        return inputs, None, None, None, None, None
