"""A line search on slopes alone: where the derivative along the line would be 0 if it were straight.

slope(t) = g(w + t s)'s         the line is searched at t = 1
t' = slope(0) / (slope(0) - slope(1))          exact where the loss is quadratic along the line
"""

from __future__ import annotations

from math import isfinite

SHORTEST, LONGEST = 0.1, 10.0
"""What a trial is multiplied by, at least and at most: slopes of different data may say anything."""


def correction(slope_before: float, slope: float, tolerance: float) -> float | None:
    """Says by what a trial step must be multiplied.

    Args:
        slope_before: along the line, where it begins.
        slope: where the trial has come.
        tolerance: what part of the slope may be left.

    Returns:
        The factor; None where the trial is good enough, or the line does not lead downhill.
    """
    usable = isfinite(slope_before) and isfinite(slope) and slope_before < 0
    if not usable or abs(slope) <= tolerance * -slope_before:
        return None
    if slope <= slope_before:  # it still gets steeper: the minimum is nowhere in sight
        return LONGEST
    return min(max(slope_before / (slope_before - slope), SHORTEST), LONGEST)
