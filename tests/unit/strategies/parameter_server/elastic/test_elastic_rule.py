"""For which numbers elastic averaging is stable, against the eigenvalues of its own iteration on a quadratic."""

import numpy as np
import pytest

from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.parameter_server.elastic.averaging import ElasticRule


def one_exchange(workers, worker, alpha, rate):
    """x' = x - rate x - alpha (x - c), c' = c + alpha (x - c), as a matrix on (x_0 … x_N-1, c)."""
    matrix = np.eye(workers + 1)
    matrix[worker, worker] = 1 - rate - alpha
    matrix[worker, -1] = alpha
    matrix[-1, worker] = alpha
    matrix[-1, -1] = 1 - alpha
    return matrix


def growth(workers, alpha, rate, together):
    """The largest absolute eigenvalue of a round."""
    if together:
        matrix = np.eye(workers + 1)
        for worker in range(workers):
            matrix[worker, worker] = 1 - rate - alpha
            matrix[worker, -1] = matrix[-1, worker] = alpha
        matrix[-1, -1] = 1 - workers * alpha
    else:
        matrix = np.eye(workers + 1)
        for worker in range(workers):
            matrix = one_exchange(workers, worker, alpha, rate) @ matrix
    return abs(np.linalg.eigvals(matrix)).max()


def rule(alpha, together):
    return ElasticRule(alpha=alpha, tau=1, together=together)


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    ("workers", "together"), [(1, False), (3, False), (5, False), (1, True), (2, True), (8, True)]
)
def test_the_bound_is_where_the_iteration_begins_to_grow(workers, together, rate):
    bound = rule(0.0, together).largest_stable_alpha(workers, rate)
    assert growth(workers, bound * 0.999, rate, together) <= 1 + 1e-9
    assert growth(workers, bound * 1.01, rate, together) > 1 + 1e-6


def test_for_one_worker_both_modes_have_the_same_bound():
    for rate in (0.0, 0.1, 1.0, 1.9):
        bounds = [rule(0.0, together).largest_stable_alpha(1, rate) for together in (False, True)]
        assert bounds[0] == pytest.approx(bounds[1])


def test_no_alpha_is_stable_where_the_step_itself_is_not():
    assert rule(0.0, False).largest_stable_alpha(4, 2.5) == rule(0.0, True).largest_stable_alpha(4, 2.5) == 0


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("spec", ["easgd", "easgd(mode=synchronous)", "eamsgd"])
def test_the_defaults_are_stable(spec, workers):
    made = build("strategy", spec, *FAMILIES)
    assert made.rule(workers).alpha == pytest.approx(0.9 / workers)
    assert made.caution(workers, 0.05) == ""


def test_who_asks_for_more_is_told_the_bound():
    text = build("strategy", "easgd(mode=synchronous, alpha=0.6)", *FAMILIES).caution(3, 0.05)
    assert "alpha=0.6 is above 0.4968" in text
    assert "\n" not in text
    assert "lower alpha or beta" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("easgd(alpha=0.1, beta=0.5)", "alpha is beta / N, so give only one of them"),
        ("easgd(alpha=-0.1)", r"alpha should be greater than or equal to 0 \(given -0\.1\)"),
        ("easgd(tau=0)", r"tau should be greater than or equal to 1 \(given 0\)"),
        ("easgd(mode=sometimes)", "mode"),
        ("eamsgd(delta=1)", "delta should be less than 1"),
    ],
)
def test_what_cannot_be_is_refused(text, message):
    with pytest.raises(RequestError, match=message):
        build("strategy", text, *FAMILIES)
