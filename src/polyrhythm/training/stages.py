"""Discriminative learning rates: the nearer a stage is to the pixels, the slower it learns.

J. Howard, S. Ruder, "Universal language model fine-tuning for text classification", ACL 2018, arXiv:1801.06146.

    lr_s = lr d^(S - 1 - s),    s = 0 … S-1 the stages from the pixels to the head

d is `decay` (the paper's 1/2.6). A stage is a child of the network; a child that is a row of several is as many stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


def stages(model: nn.Module) -> list[list[nn.Parameter]]:
    """Gives the trained parameters of every stage, from the pixels to the head; a tied one belongs to the first."""
    seen: set[nn.Parameter] = set()
    found = []
    for module in _rows(model):
        own = [each for each in module.parameters() if each.requires_grad and each not in seen]
        seen.update(own)
        if own:
            found.append(own)
    left = [each for each in model.parameters() if each.requires_grad and each not in seen]
    return [left, *found] if left else found


def graded(model: nn.Module, rate: float, decay: float) -> list[Any]:
    """Gives what an optimiser takes: the parameters, or groups of them with a learning rate each.

    Args:
        model: whose parameters.
        rate: of the last stage.
        decay: each stage's rate over that of the stage after it; 1: all alike.
    """
    if decay == 1:
        return list(model.parameters())
    parts = stages(model)
    return [
        {"params": part, "lr": rate * decay ** (len(parts) - 1 - place)} for place, part in enumerate(parts)
    ]


def _rows(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        inside = [part for part in child.children() if any(True for _ in part.parameters())]
        if isinstance(child, nn.Sequential | nn.ModuleList) and len(inside) > 1:
            yield from inside
        else:
            yield child
