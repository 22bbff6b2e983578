"""Reasons why the time or size of a network's steps does not follow from its shapes.

an operation with a result or shape that depends on numbers     seen while the network runs on shapes alone
layers used otherwise from step to step, at equal inputs        seen while steps are measured (`LayerClocks`)
embeddings with most of the parameters, or sparse gradients     seen in its modules
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyrhythm.models.architectures.sizes import SizesAlone

_MOST_EMBEDDED = 0.5
"""Share of the parameters in embeddings from which multiply-adds do not measure a step."""
_IMAGES = 2
_NAMED = 2
_SHOWN = {"_local_scalar_dense": "item", "index": "a mask"}
"""Names of operations as users know them."""


def limits_of(model: nn.Module, image_shape: tuple[int, int, int]) -> tuple[str, ...]:
    """Return why the time or size of a network's steps does not follow from its shapes; empty where it does.

    Args:
        model: network on the meta device; its buffers may change.
        image_shape: (C, H, W) of an image.
    """
    if isinstance(model, SizesAlone):
        return model.limits
    return (*dependent(model, image_shape), *embedded(model))


def dependent(model: nn.Module, image_shape: tuple[int, int, int]) -> tuple[str, ...]:
    """Return a remark on a network with layers that depend on the values of their inputs; see `limits_of`."""
    reads = _ReadsNumbers()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), reads:
            model.train()(torch.empty(_IMAGES, *image_shape, device="meta"))
    except Exception:  # a network can fail in any way on shapes alone
        pass
    if not reads.operation:
        return ()
    return (
        f"its layers depend on the values of their inputs ({reads.operation}): the step time holds for the measured "
        "inputs alone, not for other data or batch sizes",
    )


def embedded(model: nn.Module) -> tuple[str, ...]:
    """Return a remark on embeddings that have most of a network's parameters, or sparse gradients."""
    whole = sum(each.numel() for each in model.parameters())
    tables = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    share = sum(table.weight.numel() for _, table in tables) / max(whole, 1)
    if share < _MOST_EMBEDDED and not any(table.sparse for _, table in tables):
        return ()
    names = _some([name for name, _ in tables])
    return (
        f"embeddings ({names}) have {100 * share:.0f} % of the parameters: the time of a step does not follow from "
        "multiply-adds, and gradients are sent whole, also those of unused rows",
    )


def measured_limits(shapes: int, varied: Sequence[str]) -> tuple[str, ...]:
    """Return why the time of measured steps does not hold for others.

    Args:
        shapes: number of different shapes of the network's inputs, apart from the batch size.
        varied: layers that were used otherwise from step to step.
    """
    found = []
    if shapes > 1:
        found.append(
            f"inputs of {shapes} shapes: the step time holds for this mix of them alone, not for other data or batch "
            "sizes"
        )
    if varied:
        found.append(
            f"{_some(varied)} differed from step to step: the step time holds for the measured inputs alone, not for "
            "other data or batch sizes"
        )
    return tuple(found)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class _ReadsNumbers(TorchDispatchMode):
    """Notes the first operation with a shape, or a value in Python, that depends on numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operation = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.operation and _reads_numbers(func, args):
            self.operation = _SHOWN.get(name := func.overloadpacket.__name__, name)
        return func(*args, **(kwargs or {}))


def _reads_numbers(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:  # its result's shape depends on masks, not on indices
        return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1]))
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)
