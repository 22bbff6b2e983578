"""Calibrated probabilities: the temperature, the error, and the file beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from polyrhythm.errors import RequestError
from polyrhythm.evaluation.calibration import (
    Calibration,
    answered,
    calibration_error,
    fit_temperature,
    read_calibration,
    save_calibration,
    tempered,
)
from polyrhythm.evaluation.views import Views


def _scores(sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (2000, 5) that are `sharpness` times those from which the labels were drawn."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(2000, 5, generator=generator) * 2
    labels = torch.multinomial(true.softmax(1), 1, generator=generator).squeeze(1)
    return true * sharpness, labels


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_the_temperature_is_that_of_the_least_loss(sharpness: float) -> None:
    scores, labels = _scores(sharpness)
    expected = minimize_scalar(
        lambda t: float(cross_entropy(scores.double() / t, labels)), bounds=(0.05, 20), method="bounded"
    ).x
    assert fit_temperature(scores.softmax(1), labels) == pytest.approx(expected, rel=2e-3)
    assert expected == pytest.approx(sharpness, rel=0.1)


def test_what_is_always_right_or_wrong_has_a_temperature_within_limits() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    assert fit_temperature(probabilities, torch.tensor([0, 1])) == pytest.approx(0.05)
    assert fit_temperature(probabilities, torch.tensor([1, 0])) == pytest.approx(20)


def test_tempered_probabilities_are_those_of_divided_scores() -> None:
    scores, _ = _scores(1.0)
    torch.testing.assert_close(tempered(scores.softmax(1), 2.5), (scores / 2.5).softmax(1))
    assert tempered(scores, 1.0) is scores


def test_the_error_is_the_gap_of_each_bin_by_its_share() -> None:
    scores, labels = _scores(3.0)
    probabilities = scores.softmax(1).double()
    top, chosen = probabilities.max(1)
    total = 0.0
    for number in range(15):
        inside = (top > number / 15) & (top <= (number + 1) / 15)
        if inside.any():
            right = (chosen[inside] == labels[inside]).double().mean()
            total += float(inside.double().mean() * (right - top[inside].mean()).abs())
    assert calibration_error(probabilities, labels) == pytest.approx(total, abs=1e-12)
    warm = tempered(probabilities, fit_temperature(probabilities, labels))
    assert calibration_error(warm, labels) < 0.03 < total


def test_what_a_threshold_leaves() -> None:
    probabilities = torch.tensor([[0.96, 0.04], [0.75, 0.25], [0.45, 0.55], [0.1, 0.9]])
    found = {each.threshold: each for each in answered(probabilities, torch.tensor([0, 1, 1, 1]))}
    assert (found[0.3].answered, found[0.3].right) == (1.0, 0.75)
    assert (found[0.7].answered, found[0.7].right) == (0.75, pytest.approx(2 / 3))
    assert (found[0.95].answered, found[0.95].right) == (0.25, 1.0)
    assert answered(probabilities[2:3], torch.tensor([1]))[-1].right is None


def test_a_calibration_is_of_these_weights_and_views(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one network")
    assert read_calibration(weights) is None
    views = Views(dense=True, flip=True, scales=(16, 24))
    file = save_calibration(weights, Calibration(1.7, views))
    assert file == tmp_path / "model.calibration.json"
    assert read_calibration(weights) == Calibration(1.7, views)
    weights.write_bytes(b"the same, trained on")
    assert read_calibration(weights) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": 1}', '{"temperature": "NaN", "views": {}}'])
def test_a_damaged_calibration_is_refused(content: str, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one network")
    (tmp_path / "model.calibration.json").write_text(content)
    with pytest.raises(RequestError, match="is damaged: remove it"):
        read_calibration(weights)
