"""Calibrated probabilities: a temperature for the softmax, and the effect of a threshold on them.

C. Guo, G. Pleiss, Y. Sun, K. Weinberger, "On calibration of modern neural networks", ICML 2017, arXiv:1706.04599.

    q = softmax(log p / T),    T = argmin of the mean of -log q[label]      over images that were not trained on
    error = sum over bins b of |n_b / n| |right_b - mean of max q_b|        (expected calibration error, 15 equal bins)

With b = 1/T the mean is convex, and its derivative, mean of E_q[log p] - log p[label], rises: its root is
found by bisection. log p stands for the scores, which differ from it by a constant an image; so the averaged
probabilities of several views or networks are calibrated together. The most likely class does not change.

The temperature of a network is kept in a file next to its weights, for the views that it was found with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import file_digest
from pathlib import Path

import torch
from torch import Tensor

from polyrhythm.claim import UNCLAIMED
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.views import Views
from polyrhythm.run_files import exists_in_run, read_json_in_run

LEAST, MOST = 0.05, 20.0
"""Limits of the temperature; images that are all right or all wrong would have it at 0 or without end."""
_HALVINGS = 60
_BINS = 15
_SMALLEST = torch.finfo(torch.float32).tiny


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Return softmax(log p / T) of class probabilities (B, classes)."""
    if temperature == 1:
        return probabilities
    return (probabilities.clamp_min(_SMALLEST).log() / temperature).softmax(1)


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature with the lowest negative log-likelihood, from 0.05 to 20.

    Args:
        probabilities: (n, classes), of images that were not trained on.
        labels: (n,) int64.
    """
    scores = probabilities.double().clamp_min(_SMALLEST).log()
    own = scores.gather(1, labels[:, None]).squeeze(1)
    low, high = 1 / MOST, 1 / LEAST
    for _ in range(_HALVINGS):
        sharpness = (low * high) ** 0.5
        expected = ((scores * sharpness).softmax(1) * scores).sum(1)
        if float((expected - own).mean()) < 0:
            low = sharpness
        else:
            high = sharpness
    return float(1 / (low * high) ** 0.5)


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error of class probabilities (n, classes) for labels (n,), from 0 to 1."""
    likeliest, chosen = probabilities.double().max(1)
    right = (chosen == labels).double()
    bins = (likeliest * _BINS).ceil().long().clamp(1, _BINS) - 1
    gaps = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, right - likeliest)
    return float(gaps.abs().sum()) / len(labels)


@dataclass(frozen=True)
class Answered:
    """Effect of a threshold: share of images with a top probability that reaches it, and share of correct ones."""

    threshold: float
    answered: float
    right: float | None


THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


def answered(probabilities: Tensor, labels: Tensor) -> list[Answered]:
    """Return, per threshold, the share of images above it and their accuracy, from probabilities (n, classes)."""
    likeliest, chosen = probabilities.max(1)
    found = []
    for threshold in THRESHOLDS:
        kept = likeliest >= threshold
        right = float((chosen == labels)[kept].double().mean()) if bool(kept.any()) else None
        found.append(Answered(threshold, float(kept.double().mean()), right))
    return found


@dataclass(frozen=True)
class Calibration:
    """A network's temperature, and the views that it calibrates."""

    temperature: float
    views: Views


def save_calibration(weights: Path, calibration: Calibration) -> Path:
    """Write a calibration next to a file of weights, and return its file.

    Raises:
        RequestError: it cannot be written.
    """
    path = _calibration_path(weights)
    content = {**asdict(calibration), "weights_sha256": _digest(weights)}
    try:
        UNCLAIMED.write(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise RequestError(f"cannot write {path} ({error.strerror}): copy the weights elsewhere") from None
    return path


def read_calibration(weights: Path) -> Calibration | None:
    """Return the calibration of a file of weights; None if there is none, or the weights are others now.

    Raises:
        RequestError: the file next to the weights is damaged.
    """
    path = _calibration_path(weights)
    if not exists_in_run(path):
        return None
    try:
        content = read_json_in_run(path)
        views = Views(**{**content["views"], "scales": _scales(content["views"]["scales"])})
        temperature = float(content["temperature"])
        if not LEAST <= temperature <= MOST:
            raise ValueError
        known = content["weights_sha256"]
    except (OSError, ValueError, ArithmeticError, TypeError, KeyError):
        raise RequestError(f"{path} is damaged: remove it, or calibrate again") from None
    return Calibration(temperature, views) if known == _digest(weights) else None


def _scales(given: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(scale) for scale in given)


def _calibration_path(weights: Path) -> Path:
    return weights.with_suffix(".calibration.json")


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()
