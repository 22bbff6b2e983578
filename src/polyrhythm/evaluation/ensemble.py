"""Ensembles: several networks vote with their class probabilities.

R. Wu and others, "Deep Image", 2015, arXiv:1501.02876, section 4 (simple averaging of the softmax class posteriors);
R. Caruana, A. Niculescu-Mizil, G. Crew, A. Ksikes, "Ensemble selection from libraries of models", ICML 2004 (greedy).

    p = 1/M sum_m softmax(z_m)
    greedy:  S <- S + argmax_m accuracy(mean of S and m)      with replacement, until nothing is gained

Ties go to the lower loss, then to the member named first. Departure from Caruana: no bagging of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Predictor = Callable[[Tensor], Tensor]
"""Maps numbers of images, (B,) int64, to class probabilities (B, classes)."""

_SMALLEST = torch.finfo(torch.float32).tiny


def average(probabilities: Sequence[Tensor]) -> Tensor:
    """Return the mean of the members' class probabilities, each (B, classes), as (B, classes)."""
    return torch.stack(tuple(probabilities)).mean(0)


def log_probabilities(predictors: Sequence[Predictor]) -> Callable[[Tensor], Tensor]:
    """Return a function from numbers of images (B,) to the logarithm of the predictors' mean (B, classes)."""

    def together(indices: Tensor) -> Tensor:
        return average([predict(indices) for predict in predictors]).clamp_min(_SMALLEST).log()

    return together


class ProbabilityMean(nn.Module):
    """Several networks as one; its outputs are the logarithms of their mean probabilities.

    Args:
        members: map images (B, C, H, W) to logits (B, classes).
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, images: Tensor) -> Tensor:
        """Return log probabilities (B, classes) of images (B, C, H, W)."""
        return (
            average([member(images).float().softmax(1) for member in self.members]).clamp_min(_SMALLEST).log()
        )


def greedy_selection(probabilities: Tensor, labels: Tensor, most: int = 50) -> list[int]:
    """Choose members one at a time, each the one that improves the ensemble most.

    Args:
        probabilities: (members, n, classes), of images that are not part of the reported result.
        labels: (n,) int64.
        most: upper limit for the number of choices, repeated ones included.

    Returns:
        The members' numbers in the order of their choice; a repeated one has the weight of its repetitions.
    """
    chosen: list[int] = []
    # The sum stands for the mean: argmax and normalized likelihood do not depend on the number of members.
    total = torch.zeros_like(probabilities[0])
    best = (-1.0, float("-inf"))
    while len(chosen) < most:
        scores = [_score(total + member, labels) for member in probabilities]
        number = max(range(len(scores)), key=lambda index: (scores[index], -index))
        if scores[number] <= best:
            break
        best = scores[number]
        total = total + probabilities[number]
        chosen.append(number)
    return chosen


def _score(total: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return accuracy and mean log-likelihood of the labels for unnormalized probabilities (n, classes)."""
    right = (total.argmax(1) == labels).double().mean()
    likely = total.gather(1, labels[:, None]).squeeze(1) / total.sum(1)
    return float(right), float(likely.clamp_min(_SMALLEST).double().log().mean())
