"""Images to a target: exact curves come back, intervals hold the truth, and floors are never reached."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyrhythm.planning.learning_curve import Curve, fit, images_to

TRUE = Curve(b0=2e-4, b1=1.2, b2=0.0)
IMAGES = [1000.0 * number for number in range(1, 13)]


def test_an_exact_curve_comes_back() -> None:
    found = fit(IMAGES, [TRUE.error(each) for each in IMAGES])
    assert found.b0 == pytest.approx(TRUE.b0, rel=1e-6)
    assert found.b1 == pytest.approx(TRUE.b1, rel=1e-6)
    assert found.images_to(0.1) == pytest.approx((1 / 0.1 - 1.2) / 2e-4, rel=1e-6)


def test_no_target_below_the_floor_is_reached() -> None:
    flat = Curve(b0=1e-3, b1=1.0, b2=0.2)
    found = fit(IMAGES, [flat.error(each) for each in IMAGES])
    assert found.b2 == pytest.approx(0.2, abs=0.01)
    assert found.images_to(0.15) == math.inf
    assert fit(IMAGES, [0.5] * len(IMAGES)).images_to(0.4) > 100 * max(IMAGES)


def test_a_curve_that_rises_reaches_nothing() -> None:
    assert fit(IMAGES, [0.1 + 0.01 * number for number in range(12)]).images_to(0.05) == math.inf


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Of noise of 2 % on each test; 60 draws hold it at least two times in three, by intervals that say nine in ten."""
    generator = np.random.default_rng(5)
    truth, held = TRUE.images_to(0.25), 0
    for draw in range(60):
        noisy = [TRUE.error(each) * (1 + 0.02 * generator.standard_normal()) for each in IMAGES]
        middle, low, high = images_to(IMAGES, noisy, 0.25, seed=draw)
        assert low <= high
        assert middle > 0
        held += low <= truth <= high
    assert held >= 40
