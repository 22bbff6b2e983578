"""Cross-entropy of the labels: the negative log-likelihood of the softmax.

l_i = -log softmax(z_i)[y_i]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from polyrhythm.training.loss import Loss, Targets

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy(Loss):
    """The usual loss of a classifier; branches of a tree learn each on their own."""

    def __call__(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        """Return the mean of a batch, with the bits of `torch.nn.CrossEntropyLoss`; see `Loss`."""
        if logits.ndim == 2 and targets.class_weights is None:
            return functional.cross_entropy(logits, labels, label_smoothing=targets.label_smoothing)
        return super().__call__(logits, labels, targets)

    def of(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        return targets.cross_entropy(logits, labels)
