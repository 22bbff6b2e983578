"""Objective of training: a loss of the labels, and where there are teachers, their soft targets.

Learning from the probabilities of other networks, not from labels alone, is distillation:

G. Hinton, O. Vinyals, J. Dean, "Distilling the knowledge in a neural network", 2015, arXiv:1503.02531.

    loss = (1 - a) CE(y, p_1) + a T^2 KL(q_T || p_T)
    p_T = softmax(z / T),    q_T = mean over the teachers of softmax(v / T)

a is `share`, T `temperature`; T^2 keeps the soft gradient's size, whatever T is. Each branch of a student
with branches learns so, and their losses are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.training.loss import Loss, Targets
from polyrhythm.training.losses.cross_entropy import CrossEntropy


@dataclass(frozen=True)
class Teaching:
    """Weight and temperature of the teachers' targets in distillation.

    Attributes:
        temperature: divisor of the logits, above 0; the higher, the more the teachers' unlikely classes count.
        share: share of the distillation loss in the whole loss, from 0 to 1.

    Raises:
        RequestError: one is out of its range.
    """

    temperature: float = 4.0
    share: float = 0.7

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise RequestError(f"temperature {self.temperature:g} is not above 0: give 1 or more")
        if not 0 <= self.share <= 1:
            raise RequestError(f"teacher share {self.share:g} is not a share: give 0 to 1")


class Teachers:
    """Trained networks that a student learns from; together they are an ensemble.

    Args:
        models: map images to logits of the student's classes.
        image_sizes: pixels a side that each was trained on; images of other sizes are scaled for it.
        teaching: weight and softness of the targets.
    """

    def __init__(self, models: Sequence[nn.Module], image_sizes: Sequence[int], teaching: Teaching) -> None:
        self._models = [model.eval().requires_grad_(False) for model in models]
        self._sizes = tuple(image_sizes)
        self.teaching = teaching

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """Return the teachers' mean softmax at the temperature, (B, K), of images (B, C, H, W)."""
        total = torch.zeros(())
        for model, size in zip(self._models, self._sizes, strict=True):
            seen = images
            if size != images.shape[-1]:
                seen = functional.interpolate(images, (size, size), mode="bilinear", antialias=True)
            logits = model.to(images.device, images.dtype)(seen)
            total = total.to(images.device) + (logits / self.teaching.temperature).softmax(1)
        return total / len(self._models)


def soft_loss(logits: Tensor, soft_targets: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(q_T || p_T), the mean over a batch, ().

    Args:
        logits: (B, K), the student's.
        soft_targets: (B, K), the teachers' probabilities at the same temperature.
        temperature: T.
    """
    student = (logits / temperature).log_softmax(1)
    return functional.kl_div(student, soft_targets, reduction="batchmean") * temperature**2


@dataclass(frozen=True)
class Objective:
    """Objective of a batch's training.

    Attributes:
        loss: loss of the labels.
        targets: meaning of the labels.
        teachers: networks that the student learns from in addition to the labels.
    """

    loss: Loss = field(default_factory=CrossEntropy)
    targets: Targets = field(default_factory=Targets)
    teachers: Teachers | None = None

    def at(self, epoch: int, epochs: int) -> Objective:
        """Return the objective of an epoch, from 0, of `epochs`."""
        loss = self.loss.at(epoch, epochs)
        return self if loss is self.loss else replace(self, loss=loss)

    def __call__(self, logits: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        """Return a batch's loss, ().

        Args:
            logits: (B, K), or (B, R, K) of a network with branches.
            labels: (B,) int64, or (B, K) float of mixed images.
            images: (B, C, H, W), for the teachers.
        """
        if labels.is_floating_point():
            labels = labels.to(torch.promote_types(labels.dtype, logits.dtype))
        hard = self.loss(logits, labels, self.targets)
        if self.teachers is None:
            return hard
        share, temperature = self.teachers.teaching.share, self.teachers.teaching.temperature
        soft_targets = self.teachers.probabilities(images)
        branches = logits[:, None] if logits.ndim == soft_targets.ndim else logits
        soft = sum(soft_loss(branch, soft_targets, temperature) for branch in branches.unbind(1))
        return (1 - share) * hard + share * soft
