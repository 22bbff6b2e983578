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
from torch import Tensor

Predictor = Callable[[Tensor], Tensor]
"""Takes the numbers of images (B,) int64; gives class probabilities (B, classes)."""

_SMALLEST = torch.finfo(torch.float32).tiny


def average(probabilities: Sequence[Tensor]) -> Tensor:
    """Gives the mean of the members' class probabilities, each (B, classes), as (B, classes)."""
    return torch.stack(tuple(probabilities)).mean(0)


def log_probabilities(predictors: Sequence[Predictor]) -> Callable[[Tensor], Tensor]:
    """Gives what takes numbers of images (B,), and gives the logarithm of the predictors' mean (B, classes)."""

    def together(indices: Tensor) -> Tensor:
        return average([predict(indices) for predict in predictors]).clamp_min(_SMALLEST).log()

    return together


def greedy_selection(probabilities: Tensor, labels: Tensor, most: int = 50) -> list[int]:
    """Chooses members one at a time, each the one with which the ensemble so far does best.

    Args:
        probabilities: (members, n, classes), of images that the report will not count.
        labels: (n,) int64.
        most: members at most, the same one counted as often as it is taken.

    Returns:
        The members' numbers in the order of their choice; who stands there twice weighs twice.
    """
    chosen: list[int] = []
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
    """Gives accuracy, and the mean log-likelihood of the labels, of unnormalised probabilities (n, classes)."""
    right = (total.argmax(1) == labels).double().mean()
    likely = total.gather(1, labels[:, None]).squeeze(1) / total.sum(1)
    return float(right), float(likely.clamp_min(_SMALLEST).double().log().mean())
