"""Small losses only: samples with the largest losses count as mislabeled and are not learned from.

B. Han and others, "Co-teaching: robust training of deep neural networks with extremely noisy labels", NeurIPS 2018,
arXiv:1804.06872.

    S_r = the (1 - f) B samples with the least CE(z_r, y),     f = forget min(epoch / (ramp epochs), 1)
    l = mean over r and i in S_{r+1} of CE(z_ri, y_i)            each branch learns what the next one finds easy

Two networks teach each other in the paper; here they are the branches of `treenet(split=0, branches=2)`. A network
without branches chooses for itself (the paper's baseline). Networks learn what is right before they learn by heart what
is wrong, hence the ramp: the paper's takes 10 of its 200 epochs. Departure: the choice is made in a worker's own batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.training.loss import Loss, Targets

if TYPE_CHECKING:
    from torch import Tensor


class SmallLoss(Loss):
    """The loss of the samples that are learned easily.

    Attributes:
        forget: share of a batch that is not learned from; about the share of wrong labels.
        ramp: share of the run's epochs in which `forget` rises from 0; 0: it does not.
    """

    forget: float = Field(0.2, ge=0, lt=1)
    ramp: float = Field(0.05, ge=0, le=1)

    def at(self, epoch: int, epochs: int) -> SmallLoss:
        """Return the loss with what is forgotten in that epoch; see `Loss.at`."""
        rising = self.ramp * epochs
        if epoch >= rising:
            return self
        return self.model_copy(update={"forget": self.forget * epoch / rising})

    def of(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        """Return the loss of each sample, 0 for those left out; see `Loss.of`."""
        losses = targets.cross_entropy(logits, labels)
        return losses * self._kept(losses)

    def of_branches(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        """Return each sample's loss, summed over the branches with a teacher that kept it: `Loss.of_branches`."""
        losses = torch.stack([targets.cross_entropy(branch, labels) for branch in logits.unbind(1)])
        kept = torch.stack([self._kept(each) for each in losses])
        return (losses * kept.roll(-1, 0)).sum(0)

    def _kept(self, losses: Tensor) -> Tensor:
        """Return (B,): B over the number kept for each of the smallest, 0 for the others, so that the mean is one."""
        number = max(1, round((1 - self.forget) * len(losses)))
        smallest = losses.detach().topk(number, largest=False, sorted=False).indices
        return torch.zeros_like(losses).index_fill_(0, smallest, len(losses) / number).detach()
