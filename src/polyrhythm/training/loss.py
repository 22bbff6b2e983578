"""Common base of losses: a number a sample, from one vector of scores or those of several branches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

_BRANCHED = 3


@dataclass(frozen=True)
class Targets:
    """Meaning of the labels of a batch.

    Attributes:
        label_smoothing: share e of every target that is spread evenly over all K classes, the true one included:
            `(1 - e) CE(true class) + e mean over classes of CE(class)`. Szegedy and others, "Rethinking the Inception
            architecture for computer vision", CVPR 2016, arXiv:1512.00567.
        class_weights: (K,), what a sample of each class counts; None: all alike.

    Raises:
        RequestError: the share is not in [0, 1).
    """

    label_smoothing: float = 0.0
    class_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise RequestError(
                f"label smoothing {self.label_smoothing} is not a share: give at least 0 and less than 1"
            )

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy (B,) of logits (B, K) and labels, in nats, unweighted.

        Labels are (B,) int64, or (B, K) float, a distribution over the classes; so they are in all of a loss.
        """
        return functional.cross_entropy(
            logits, labels, reduction="none", label_smoothing=self.label_smoothing
        )

    def weights(self, labels: Tensor) -> Tensor | None:
        """Return the weight of each sample (B,); None: all alike."""
        if self.class_weights is None:
            return None
        weights = self.class_weights.to(labels.device)
        return labels @ weights.to(labels.dtype) if labels.is_floating_point() else weights[labels]


class Loss(Config, ABC):
    """A loss's keys, and its rule."""

    def __call__(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        """Return the loss of a batch, ().

        Args:
            logits: (B, K), or (B, R, K) of a network with R branches.
            labels: (B,) int64, or (B, K) float of mixed images.
            targets: meaning of the labels.
        """
        each = self.of_branches if logits.ndim == _BRANCHED else self.of
        losses, weights = each(logits, labels, targets), targets.weights(labels)
        # divided by the batch, not by the sum of the weights: batches of several workers then add up to one large one
        return losses.mean() if weights is None else (losses * weights).mean()

    def at(self, epoch: int, epochs: int) -> Loss:
        """Return the loss of an epoch, from 0, of `epochs`; by default the same in all."""
        return self

    @abstractmethod
    def of(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        """Return the loss of each sample, (B,), of logits (B, K)."""

    def of_branches(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        """Return the loss of each sample, (B,), of logits (B, R, K).

        By default, each branch learns on its own: their losses are added up, so that a branch gets
        the gradient that it would get alone, and a trunk the sum.
        """
        losses = [self.of(branch, labels, targets) for branch in logits.unbind(1)]
        total = losses[0]
        for other in losses[1:]:
            total = total + other
        return total
