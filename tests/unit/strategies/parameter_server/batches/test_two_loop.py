"""The two-loop recursion on scalars against the inverse BFGS formula on whole matrices."""

import pytest
import torch

from polyrhythm.strategies.parameter_server.sandblaster import two_loop

NUMBERS = 7


def pairs_of(count):
    generator = torch.Generator().manual_seed(count)
    root = torch.randn(NUMBERS, NUMBERS, generator=generator, dtype=torch.float64)
    hessian = root @ root.T + torch.eye(NUMBERS, dtype=torch.float64)
    steps = torch.randn(count, NUMBERS, generator=generator, dtype=torch.float64)
    return steps, steps @ hessian, torch.randn(NUMBERS, generator=generator, dtype=torch.float64)


def inverse_hessian(steps, changes):
    """H = (1 - s y'/s'y) H (1 - y s'/s'y) + s s'/s'y, beginning with s'y/y'y of the newest pair."""
    identity = torch.eye(NUMBERS, dtype=torch.float64)
    found = identity * (steps[-1] @ changes[-1]) / (changes[-1] @ changes[-1])
    for s, y in zip(steps, changes, strict=True):
        turned = identity - torch.outer(s, y) / (s @ y)
        found = turned @ found @ turned.T + torch.outer(s, s) / (s @ y)
    return found


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_it_is_the_inverse_bfgs_formula(count):
    steps, changes, gradient = pairs_of(count)
    vectors = torch.stack([*steps, *changes, gradient])
    shares = two_loop(vectors @ vectors.T, [(i, count + i) for i in range(count)], 2 * count)
    expected = inverse_hessian(steps, changes) @ gradient
    torch.testing.assert_close(shares @ vectors, expected, rtol=1e-9, atol=1e-10)


def test_pairs_that_are_not_named_do_not_matter():
    steps, changes, gradient = pairs_of(4)
    vectors = torch.stack([*steps, *changes, gradient])
    shares = two_loop(vectors @ vectors.T, [(2, 6), (3, 7)], 8)
    assert shares[[0, 1, 4, 5]].tolist() == [0.0] * 4
    expected = inverse_hessian(steps[2:], changes[2:]) @ gradient
    torch.testing.assert_close(shares @ vectors, expected, rtol=1e-9, atol=1e-10)


def test_without_pairs_it_is_the_gradient():
    assert two_loop(torch.tensor([[3.0]], dtype=torch.float64), [], 0).tolist() == [1.0]
