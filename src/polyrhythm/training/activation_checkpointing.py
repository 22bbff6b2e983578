"""Activation checkpointing: only the inputs of a network's blocks are kept, and the rest is computed again.

Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016, arXiv 1604.06174.

    forward     x ─▶ block ─▶ x ─▶ block ─▶ x ─▶ block ─▶ loss        kept: every x
    backward                       again ◀─        again ◀─           kept in addition: the activations of one block

Blocks are the residual, inverted, dense or attention blocks that a network is built of. Plain chains of layers, such as
VGG, have none: most of their memory is that of their first layers, which any piece with these needs again.

The second computation has the random numbers and the precision of the first one, and leaves buffers as they are, so
gradients and running statistics have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.errors import RequestError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class CheckpointedBlocks:
    """The blocks of a network, which can be run with activation checkpointing.

    Args:
        model: network; changed inside `on` only.
        statistics: function that returns the context in which a block computes again, for batches of one image.

    Raises:
        RequestError: the network has no blocks.
    """

    def __init__(
        self, model: nn.Module, statistics: Callable[[nn.Module], AbstractContextManager[None]]
    ) -> None:
        self._statistics = statistics
        self.blocks = list(_blocks(model))
        if not self.blocks:
            raise RequestError(
                "the network is not built of blocks, as residual networks are, and a plain chain of layers would need "
                "the same memory: leave activation_checkpointing out"
            )

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let the blocks' passes keep their inputs only, inside."""
        for block in self.blocks:
            block.__dict__["forward"], block.__dict__["_kept_forward"] = (
                partial(self._forward, block, block.forward),
                block.__dict__.get("forward"),
            )
        try:
            yield
        finally:
            for block in self.blocks:
                kept = block.__dict__.pop("_kept_forward")
                if kept is None:
                    del block.__dict__["forward"]
                else:
                    block.__dict__["forward"] = kept

    def _forward(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self._second(block)

        given = [
            list(each) if isinstance(each, list) else each for each in args
        ]  # callers may append to theirs
        versions = [each._version for each in args if isinstance(each, Tensor)]
        outputs = checkpoint(forward, *given, use_reentrant=False, context_fn=contexts, **kwargs)
        if versions != [each._version for each in args if isinstance(each, Tensor)]:
            raise RequestError(
                f"{type(block).__name__} changes its input in place, which could not be computed from again: leave "
                "activation_checkpointing out"
            )
        return outputs

    @contextmanager
    def _second(self, block: nn.Module) -> Iterator[None]:
        """Leave buffers as they are, such as running statistics, inside."""
        kept = [(each, dict(each._buffers)) for each in block.modules() if each.training and each._buffers]
        for module, buffers in kept:
            module._buffers.update(
                {name: value.clone() for name, value in buffers.items() if value is not None}
            )
        try:
            with self._statistics(block):
                yield
        finally:
            for module, buffers in kept:
                module._buffers.update(buffers)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _is_built_of_blocks(module: nn.Module) -> bool:
    """Return whether a module has a container of several blocks."""
    containers = (each for each in module.modules() if isinstance(each, _CONTAINERS))
    return any(sum(map(_is_block, each.children())) > 1 for each in containers)


def _is_block(module: nn.Module) -> bool:
    """Return whether a module computes more than one layer after the other, or is made of such modules."""
    if isinstance(module, _CONTAINERS):
        return not all(map(_is_leaf, module.children()))
    return not _is_leaf(module)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_leaf(child) or not any(True for _ in child.parameters()):
            continue
        if type(child) in _CONTAINERS or _is_built_of_blocks(child):
            yield from _blocks(child)
        else:
            yield child
