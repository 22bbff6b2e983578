"""Adagrad without an epsilon, against its rule in numpy."""

import numpy as np
import torch
from torch import nn

from polyrhythm.training.optimizers.downpour_adagrad import DownpourAdagrad


def trained(start, gradients, **keys):
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = DownpourAdagrad(**keys).create([parameter])
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.detach().numpy()


def test_the_rule_by_hand():
    gradients = [[1.0, -2.0, 0.5], [3.0, 0.0, -0.25], [-1.0, 4.0, 8.0]]
    weights, squares = np.array([0.5, 1.0, -1.0]), np.zeros(3)
    for gradient in map(np.array, gradients):
        squares += gradient**2
        weights -= 0.1 * gradient / np.sqrt(squares)
    np.testing.assert_allclose(trained([0.5, 1.0, -1.0], gradients, lr=0.1), weights, rtol=1e-15)


def test_the_first_step_is_the_learning_rate_exactly_however_small_the_gradient():
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-15, 15, (1000,), generator=generator)
    gradient = torch.randn(1000, generator=generator) * sizes
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = gradient
    DownpourAdagrad(lr=0.125).create([parameter]).step()
    assert torch.equal(parameter.detach(), -0.125 * gradient.sign())


def test_numbers_without_a_gradient_stay_where_they_are():
    found = trained([1.0, 2.0], [[0.0, 1.0], [0.0, 0.0]], lr=0.5)
    assert found.tolist() == [1.0, 1.5]


def test_weight_decay_is_added_to_the_gradient():
    assert trained([2.0], [[0.0]], lr=0.5, weight_decay=0.1).tolist() == [1.5]
