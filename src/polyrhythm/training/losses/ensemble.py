"""Cross-entropy of the branches' mean probabilities: a tree's branches learn to be right together.

S. Lee and others, "Why M heads are better than one: training a diverse ensemble of deep networks" (TreeNets), 2015,
arXiv:1511.06314, section 5.1.

    l_i = -log( 1/R sum_r softmax(z_ir)[y_i] )

Computed in logarithms, so that nothing underflows. Without branches it is the cross-entropy.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from polyrhythm.training.loss import Loss, Targets

if TYPE_CHECKING:
    from torch import Tensor


class Ensemble(Loss):
    """The loss of the branches' average."""

    def of(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        return targets.cross_entropy(logits, labels)

    def of_branches(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        together = logits.log_softmax(2).logsumexp(1) - log(logits.shape[1])
        return targets.cross_entropy(together, labels)
