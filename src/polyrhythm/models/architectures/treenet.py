"""TreeNet: networks that share their first layers, an ensemble for less than the cost of separate networks.

S. Lee, S. Purushwalkam, M. Cogswell, D. Crandall, D. Batra, "Why M heads are better than one: training a diverse
ensemble of deep networks", 2015, arXiv:1511.06314.

    h = trunk(x);   z_r = branch_r(h), r = 1 … R;   p = 1/R sum_r softmax(z_r)

    split=0   R networks          split=all   one network with R equal votes

    x ─┬─ ▢▢▢▢ ─ z_1              x ─ ▢▢▢▢ ─┬─ z_1
       └─ ▢▢▢▢ ─ z_2                        └─ z_2

R is `branches`; `split` counts layers with weights. In training the output holds the scores of every branch, (B, R, K),
for the loss (`--loss ensemble`, `oracle`, or each on its own); in evaluation it is log p, (B, K).
"""

from __future__ import annotations

from math import log
from typing import Annotated, Any, cast

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.models.architectures import Architecture
from polyrhythm.specs import Config, chosen

_ARCHITECTURES = "polyrhythm.models.architectures"


class Tree(nn.Module):
    """A trunk, which maps images to the input of the branches, and these, which map that to logits (B, K)."""

    def __init__(self, trunk: nn.Module, branches: list[nn.Module]) -> None:
        super().__init__()
        self.trunk = trunk
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor) -> Tensor:
        """Return every branch's logits (B, R, K) in training, the logarithm of their mean softmax (B, K) otherwise."""
        shared = self.trunk(images)
        scores = torch.stack([branch(shared) for branch in self.branches], 1)
        if self.training:
            return scores
        return scores.log_softmax(2).logsumexp(1) - log(len(self.branches))


class TreeNet(Config):
    """Networks with a common trunk.

    Attributes:
        base: the network that branches: one of `mlp`, `lenet5`, `deep_image`.
        branches: number of branches.
        split: number of shared layers with weights; 0 shares nothing.
    """

    base: Annotated[Any, chosen("model", _ARCHITECTURES)] = Field(default="lenet5", validate_default=True)
    branches: PositiveInt = 4
    split: int = Field(1, ge=0)

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network; the weights of its trunk and branches are drawn independently.

        Raises:
            RequestError: the base is no plain sequence of layers, or has fewer layers with weights than `split`.
        """
        base = cast("Architecture", self.base)
        made = [base.create(classes, image_shape) for _ in range(self.branches)]
        cut = self._cut(made[0])
        trunk = cast("nn.Sequential", made[0])[:cut]
        return Tree(trunk, [cast("nn.Sequential", each)[cut:] for each in made])

    def _cut(self, model: nn.Module) -> int:
        """Return the number of shared modules; those without weights belong to the layer before them."""
        if not isinstance(model, nn.Sequential):
            raise RequestError(
                f"treenet cannot branch {self.base}: take mlp, lenet5 or deep_image as its base"
            )
        weighted = [place for place, layer in enumerate(model) if isinstance(layer, nn.Linear | nn.Conv2d)]
        if self.split > len(weighted):
            raise RequestError(
                f"treenet: {self.base} has {len(weighted)} layers with weights, so split={self.split} is too many"
            )
        return [*weighted, len(model)][self.split] if self.split else 0
