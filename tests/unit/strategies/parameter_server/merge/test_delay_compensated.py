"""Delay compensation, against arithmetic in plain Python."""

import pytest
import torch

from polyrhythm.strategies.parameter_server.merge.delay_compensated import DelayCompensated


def corrected(rule, gradient, seen, values, pusher=0, merger=None):
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (gradient, seen, values)]
    return (merger or rule.merger()).correct(pusher, numbers[0], numbers[1], numbers[2]).tolist()


@pytest.mark.parametrize(("h", "w", "exact"), [(2.0, 0.5, True), (0.5, 2.0, True), (2.0, 1.0, False)])
def test_compensation_of_a_parabola_is_exact_where_the_papers_condition_holds(h, w, exact):
    """f = h w^2 / 2, so g = h w; the correction is what the gradient has changed by iff lambda0 h w^2 = 1."""
    rule = DelayCompensated(variant="c", lambda0=2 if h == 2 else 0.5)
    assert (rule.strength * h * w**2 == 1) == exact
    [found] = corrected(rule, [h * w], [w], [w + 0.25])
    assert (found == h * (w + 0.25)) == exact


@pytest.mark.parametrize("variant", ["c", "a"])
def test_nothing_is_corrected_where_nothing_moved_nor_with_strength_0(variant):
    gradient = torch.randn(20, generator=torch.Generator().manual_seed(1))
    values = torch.linspace(-1, 1, 20)
    at_rest = DelayCompensated(variant=variant).merger().correct(0, gradient, values, values)
    assert torch.equal(at_rest, gradient)
    off = DelayCompensated(variant=variant, lambda0=0).merger()
    assert torch.equal(off.correct(0, gradient, values + 1, values), gradient)
