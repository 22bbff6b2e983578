"""The head of fine-tuning: the optimum that scikit-learn finds, and a strength by cross-validation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from polyrhythm.training.logistic import STRENGTHS, choose_strength, fit


def blobs(
    count: int, width: int, classes: int, apart: float, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centers = torch.randn(classes, width, generator=numbers) * apart
    scale = torch.rand(width, generator=numbers) * 10 + 0.1
    return (centers[labels] + torch.randn(count, width, generator=numbers)) * scale + 3, labels


@pytest.mark.parametrize("width", [5, 200])
@pytest.mark.parametrize("strength", [1.0, 100.0])
def test_the_head_is_scikit_learns(width: int, strength: float) -> None:
    features, labels = blobs(90, width, 3, 0.3)
    head = fit(features[None], labels, 3, strength)
    centered = (features - features.mean(0)).double()
    standard = (centered / centered.square().mean().sqrt()).numpy()
    theirs = LogisticRegression(C=1 / strength, tol=1e-8, max_iter=5000).fit(standard, labels.numpy())
    expected = standard @ theirs.coef_.T + theirs.intercept_
    found = head(features).double().numpy()
    np.testing.assert_allclose(
        found - found.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), atol=2e-3
    )


def test_views_of_a_picture_count_as_one() -> None:
    features, labels = blobs(60, 8, 3, 0.5)
    once, thrice = fit(features[None], labels, 3, 1.0), fit(features.expand(3, -1, -1), labels, 3, 1.0)
    torch.testing.assert_close(thrice(features), once(features), atol=1e-3, rtol=0)


def test_a_feature_that_never_changes_is_harmless() -> None:
    features, labels = blobs(60, 8, 3, 2.0)
    features[:, 3] = 7.0
    head = fit(features[None], labels, 3, 1.0)
    assert torch.isfinite(head.weight).all()
    assert (head(features).argmax(1) == labels).float().mean() > 0.95


def test_noise_wants_a_strong_penalty_and_a_clear_case_a_weak_one() -> None:
    noise, labels = blobs(120, 60, 3, 0.0)
    assert choose_strength(noise[None], labels, 3).strength >= 100
    clear, labels = blobs(120, 60, 3, 3.0)
    choice = choose_strength(clear[None], labels, 3)
    assert choice.strength <= 10
    assert choice.top1 == 1.0


def test_a_class_with_one_picture_is_fitted() -> None:
    features, labels = blobs(41, 8, 4, 2.0)
    labels[:] = torch.tensor([0, 1] * 20 + [2])
    choice = choose_strength(features[None], labels, 3, STRENGTHS[-2:])
    assert fit(features[None], labels, 3, choice.strength).weight.shape == (3, 8)
