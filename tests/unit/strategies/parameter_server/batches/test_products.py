"""Scalar products in blocks, and sums of multiples, against whole matrices."""

import pytest
import torch

from polyrhythm.strategies.parameter_server.sandblaster import combined, gram_of

LENGTH = (1 << 14) + 5  # a block and a little


def vectors():
    return torch.randn(5, LENGTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("known", [[], [0], [0, 2], [1, 3], [0, 1, 2, 3, 4]])
def test_products_are_those_of_the_whole_and_known_ones_are_taken_over(known):
    whole = vectors().double() @ vectors().double().T
    told = -whole[known][:, known]  # none that would come out by themselves
    expected = whole.clone()
    for row, first in enumerate(known):
        for column, second in enumerate(known):
            expected[first, second] = told[row, column]
    found = gram_of([*vectors()], known, told)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)


def test_a_sum_of_multiples_keeps_the_dtype():
    shares = torch.tensor([0.5, 0.0, -2.0, 1e-3, 3.0], dtype=torch.float64)
    found = combined([*vectors()], shares)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), shares @ vectors().double(), rtol=1e-6, atol=1e-7)
