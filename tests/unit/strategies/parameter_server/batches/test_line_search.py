"""Corrections along a line, by hand."""

import pytest

from polyrhythm.strategies.parameter_server.sandblaster import LONGEST, SHORTEST, correction


@pytest.mark.parametrize(
    ("before", "slope", "factor"),
    [
        (-1.0, -0.5, 2.0),  # half of the slope is left half way
        (-1.0, 1.0, 0.5),
        (-4.0, 4 / 3, 0.75),
        (-1.0, 99.0, SHORTEST),
        (-1.0, -0.95, LONGEST),
        (-1.0, -1.0, LONGEST),
        (-1.0, -2.0, LONGEST),
    ],
)
def test_it_goes_to_where_a_straight_slope_is_0(before, slope, factor):
    assert correction(before, slope, 0.0) == pytest.approx(factor)


def test_what_is_flat_enough_is_left():
    assert correction(-1.0, 0.25, 0.25) is None
    assert correction(-1.0, -0.25, 0.25) is None
    assert correction(-1.0, 0.26, 0.25) is not None
    assert correction(-1.0, 0.0, 0.0) is None


@pytest.mark.parametrize("before", [0.0, 1.0, float("nan"), float("-inf")])
def test_a_line_that_does_not_lead_downhill_is_left(before):
    assert correction(before, 5.0, 0.1) is None
    assert correction(-1.0, float("nan"), 0.1) is None
