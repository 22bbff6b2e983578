"""Delay compensation, against arithmetic in plain Python."""

from math import sqrt

import pytest
import torch

from polyrhythm.strategies.parameter_server.merge.delay_compensated import DelayCompensated


def corrected(rule, gradient, seen, values, pusher=0, merger=None):
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (gradient, seen, values)]
    return (merger or rule.merger()).correct(pusher, numbers[0], numbers[1], numbers[2]).tolist()


def test_a_constant_strength_by_hand():
    found = corrected(
        DelayCompensated(variant="c", lambda0=0.5), [2.0, -3.0, 0.0], [1.0, 1.0, 1.0], [1.5, 0.0, 9.0]
    )
    assert found == [2 + 0.5 * 4 * 0.5, -3 + 0.5 * 9 * -1, 0.0]


def test_an_adaptive_strength_has_a_mean_square_for_every_worker():
    rule = DelayCompensated(variant="a", lambda0=2, m=0.75, epsilon=1e-7)
    merger = rule.merger()
    kept = {0: 0.0, 1: 0.0}
    for pusher, gradient, seen, now in [(0, 2.0, 1.0, 1.5), (1, -1.0, 1.0, 0.5), (0, 4.0, 1.5, 1.0)]:
        kept[pusher] = 0.75 * kept[pusher] + 0.25 * gradient**2  # first updated, then used
        expected = gradient + 2 / sqrt(kept[pusher] + 1e-7) * gradient**2 * (now - seen)
        [found] = corrected(rule, [gradient], [seen], [now], pusher, merger)
        assert found == pytest.approx(expected, rel=1e-14)


def test_without_memory_the_adaptive_form_is_that_of_the_absolute_gradient():
    generator = torch.Generator().manual_seed(0)
    gradient, seen, values = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    rule = DelayCompensated(variant="a", lambda0=1.5, m=0, epsilon=1e-300)
    found = rule.merger().correct(0, gradient, seen, values)
    torch.testing.assert_close(found, gradient + 1.5 * gradient.abs() * (values - seen), rtol=1e-12, atol=0)


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


def test_gradients_and_values_stay_as_they_are():
    gradient, seen, values = (torch.full((3,), number) for number in (1.0, 2.0, 3.0))
    DelayCompensated().merger().correct(0, gradient, seen, values)
    assert [x.tolist() for x in (gradient, seen, values)] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_the_papers_strengths_are_the_defaults():
    assert (DelayCompensated(variant="c").strength, DelayCompensated().strength) == (0.04, 2.0)


def test_the_state_goes_round():
    rule = DelayCompensated(m=0.5)
    first, second = rule.merger(), rule.merger()
    corrected(rule, [2.0], [0.0], [1.0], 1, first)
    second.load_state(first.state())
    assert corrected(rule, [3.0], [0.0], [1.0], 1, first) == corrected(rule, [3.0], [0.0], [1.0], 1, second)
    assert corrected(rule, [3.0], [0.0], [1.0], 1, rule.merger()) != corrected(
        rule, [3.0], [0.0], [1.0], 1, second
    )
