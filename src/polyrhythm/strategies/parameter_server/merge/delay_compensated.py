"""Delay compensation (DC): a gradient is corrected for what the parameters have moved since its worker read them.

Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
arXiv 1609.08326.

    g' = g + lambda_t * g * g * (w - w_bak(i))      elementwise; w_bak(i) is what worker i was answered with
    c:  lambda_t = lambda0          a:  lambda_t = lambda0 / sqrt(MS + epsilon),  MS' = m * MS + (1 - m) * g * g

The fields `variant` (c or a), `lambda0`, `m` and `epsilon` have the names of the symbols. MS begins with zeros and is
updated before it is used. There is one per worker, as in the authors' code.

Departures from that code:

- w_bak is what was answered, not what was there at the push.
- A worker that has not been answered since a run was resumed pulls first, so no correction is made against zeros.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyrhythm.strategies.parameter_server.rules.merge_rule import Merger, MergeRule
from polyrhythm.strategies.state import StateField
from polyrhythm.training.quantities import Decay, NonNegative, Positive

PAPERS_LAMBDA0 = {"c": 0.04, "a": 2.0}
"""For CIFAR-10."""


class DelayCompensated(MergeRule):
    """Gradients as they would be, to first order, at the parameters of now.

    Attributes:
        variant: `c` for a constant strength, `a` for one that adapts to the gradients' mean square.
        lambda0: strength of the correction; default: the paper's, 0.04 for `c` and 2 for `a`.
        m: decay of the mean square per step; of `a` only.
        epsilon: constant added to the mean square; of `a` only.
    """

    remembers: ClassVar[bool] = True

    variant: Literal["c", "a"] = "a"
    lambda0: NonNegative | None = None
    m: Decay = 0.95
    epsilon: Positive = 1e-7

    @property
    def strength(self) -> float:
        """lambda0, as given or the paper's."""
        return PAPERS_LAMBDA0[self.variant] if self.lambda0 is None else self.lambda0

    def merger(self) -> Merger:
        return DelayCompensatedMerger(self)


class DelayCompensatedMerger(Merger):
    """Keeps a mean square a worker."""

    fields = (StateField("", dict[int, Tensor], at="_mean_squares"),)

    def __init__(self, rule: DelayCompensated) -> None:
        self._rule = rule
        self._mean_squares: dict[int, Tensor] = {}

    def correct(self, pusher: int, gradient: Tensor, seen: Tensor | None, values: Tensor) -> Tensor:
        """Add the correction."""
        rule = self._rule
        if rule.strength == 0:
            return gradient
        assert seen is not None, "a push follows an answer"
        square = gradient * gradient
        moved = (values - seen).mul_(square).mul_(rule.strength)
        if rule.variant == "a":
            kept = self._mean_squares.setdefault(pusher, torch.zeros_like(square))
            kept.mul_(rule.m).add_(square, alpha=1 - rule.m)
            moved.div_((kept + rule.epsilon).sqrt_())
        return moved.add_(gradient)
