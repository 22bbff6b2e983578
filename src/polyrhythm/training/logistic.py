"""Multinomial logistic regression on features, for the last layer of a network with a frozen backbone.

D. Cox, "The regression analysis of binary sequences", JRSS B 20, 1958; D. Böhning, "Multinomial logistic regression
algorithm", Annals of the Institute of Statistical Mathematics 44, 1992. Minimized by L-BFGS (D. Liu, J. Nocedal,
Mathematical Programming 45, 1989), over features of mean 0 and, all together, of mean square 1. They share
one scale, since features that hardly vary in the training images carry little information about others, and
would get weights so large that the next step of training breaks the network:

    f(W, b) = sum_i c_i CE(W x_i + b, y_i) + strength/2 |W|^2

f is convex, so the result is the optimum whatever the start. Every x_i is one view of an image; c_i is one over the
number of its views, so that an image counts once. `strength` is 1/C of scikit-learn's `LogisticRegression`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from polyrhythm.data.seeding import generator_for

STRENGTHS = tuple(10.0**power for power in (4, 3.5, 3, 2.5, 2, 1.5, 1, 0.5, 0))
FOLDS = 5
_FEW = 5000
"""Rows up to which all folds are tried; above, the first fold is enough."""
_ITERATIONS = 200


@dataclass(frozen=True)
class LinearHead:
    """A linear layer: `weight` (classes, D) and `bias` (classes,), float32."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Return the logits (n, classes) of features (n, D)."""
        return features @ self.weight.T + self.bias


@dataclass(frozen=True)
class Choice:
    """A strength chosen by cross-validation, with the mean log loss and top-1 of the images left out."""

    strength: float
    loss: float
    top1: float


def fit(
    features: Tensor, labels: Tensor, classes: int, strength: float, start: LinearHead | None = None
) -> LinearHead:
    """Return the optimum.

    Args:
        features: (views, n, D): every image's views.
        labels: labels, (n,) int64.
        classes: number of classes.
        strength: strength of the penalty, above 0.
        start: initial head, which affects the time only; None: zeros.
    """
    views, count, width = features.shape
    rows = features.reshape(views * count, width)
    mean = rows.mean(0)
    rows = rows - mean
    scale = max(float(rows.square().mean().sqrt()), 1e-12)
    rows = (rows / scale).double()
    basis = None
    if (
        len(rows) < width
    ):  # the optimum lies in the span of the rows, in which there are fewer numbers to find
        basis = torch.linalg.qr(rows.T).Q
        rows = rows @ basis
    targets = labels.repeat(views)
    weight = torch.zeros(classes, rows.shape[1], dtype=torch.float64)
    bias = torch.zeros(classes, dtype=torch.float64)
    if start is not None:
        scaled = (start.weight * scale).double()
        weight = scaled @ basis if basis is not None else scaled
        bias = (start.bias + start.weight @ mean).double()
    weight.requires_grad_()
    bias.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=_ITERATIONS,
        history_size=20,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(rows @ weight.T + bias, targets, reduction="sum") / views
        loss = (loss + strength / 2 * weight.square().sum()) / count
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    found = weight.detach() if basis is None else weight.detach() @ basis.T
    unscaled = found / scale
    return LinearHead(unscaled.float(), (bias.detach() - unscaled @ mean.double()).float())


def choose_strength(
    features: Tensor, labels: Tensor, classes: int, strengths: Sequence[float] = STRENGTHS
) -> Choice:
    """Return the strength with the least log loss of held-out images; of equals the strongest.

    Images, not views, are held out, and they are scored by their first view.

    Args:
        features: (views, n, D); the first view is the image as it is.
        labels: labels, (n,) int64.
        classes: number of classes.
        strengths: strengths from the strongest to the weakest.
    """
    folds = _folds(labels)
    losses, right, judged = [0.0] * len(strengths), [0] * len(strengths), 0
    for fold in range(FOLDS if features.shape[0] * len(labels) <= _FEW else 1):
        out = folds == fold
        if not bool(out.any()) or bool(out.all()):
            continue
        judged += int(out.sum())
        head = None
        for place, strength in enumerate(strengths):
            head = fit(features[:, ~out], labels[~out], classes, strength, head)
            logits = head(features[0, out])
            losses[place] += float(cross_entropy(logits, labels[out], reduction="sum"))
            right[place] += int((logits.argmax(1) == labels[out]).sum())
    if not judged:
        return Choice(strengths[0], float("nan"), float("nan"))
    best = min(range(len(strengths)), key=lambda place: (losses[place], place))
    return Choice(strengths[best], losses[best] / judged, right[best] / judged)


def _folds(labels: Tensor) -> Tensor:
    """Return a fold for every image, (n,) int64, so that every class is spread over all of them."""
    folds = torch.empty_like(labels)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator_for("folds", label))]
        folds[shuffled] = (torch.arange(len(members)) + label) % FOLDS
    return folds
