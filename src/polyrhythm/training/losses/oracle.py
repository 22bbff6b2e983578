"""Oracle loss: only the branch that does best on a sample learns from it, so that branches become specialists.

A. Guzman-Rivera, D. Batra, P. Kohli, "Multiple choice learning", NIPS 2012; for networks S. Lee and others (TreeNets),
2015, arXiv:1511.06314, section 5.2.

    l_i = min_r CE(z_ir, y_i)

Ties go to the first branch. Without branches it is the cross-entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyrhythm.training.loss import Loss, Targets

if TYPE_CHECKING:
    from torch import Tensor


class Oracle(Loss):
    """The loss of the best branch."""

    def of(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        return targets.cross_entropy(logits, labels)

    def of_branches(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        each = torch.stack([self.of(branch, labels, targets) for branch in logits.unbind(1)], 1)
        # argmin and gather, since the gradient of `amin` is shared among equals
        return each.gather(1, each.argmin(1, keepdim=True)).squeeze(1)
