"""What training minimises: a loss of the labels, and where there are teachers, their soft targets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from polyrhythm.training.loss import Loss, Targets
from polyrhythm.training.losses.cross_entropy import CrossEntropy
from polyrhythm.training.passes.distillation import Teachers, soft_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """What a batch's training minimises.

    Attributes:
        loss: of the labels.
        targets: what the labels stand for.
        teachers: whom the student learns from besides.
    """

    loss: Loss = field(default_factory=CrossEntropy)
    targets: Targets = field(default_factory=Targets)
    teachers: Teachers | None = None

    def at(self, epoch: int, epochs: int) -> Objective:
        """Gives what is minimised in an epoch, from 0, of a run of so many."""
        loss = self.loss.at(epoch, epochs)
        return self if loss is self.loss else replace(self, loss=loss)

    def __call__(self, logits: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        """Gives a batch's loss, ().

        Args:
            logits: (B, K), or (B, R, K) of a network with branches.
            labels: (B,) int64.
            images: (B, C, H, W), for the teachers.
        """
        hard = self.loss(logits, labels, self.targets)
        if self.teachers is None:
            return hard
        share, temperature = self.teachers.teaching.share, self.teachers.teaching.temperature
        soft_targets = self.teachers.probabilities(images)
        branches = logits[:, None] if logits.ndim == soft_targets.ndim else logits
        soft = sum(soft_loss(branch, soft_targets, temperature) for branch in branches.unbind(1))
        return (1 - share) * hard + share * soft
