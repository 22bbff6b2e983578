"""The natural gradient against dense matrices in numpy; and that without a Fisher matrix it is the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from equivalence.dense_fisher import Dense
from polyrhythm.specs import build
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.natural_gradient import LowRankFisher
from polyrhythm.training.optimizer_plan import OptimizerPlan

FOLDER = "polyrhythm.training.optimizers"
ALPHA, ETA = 4.0, 0.1
SIZE, RANK = 9, 3


def rows(seed, many=20, size=SIZE):
    """Gives rows whose directions are of very different lengths."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal((many, size)) * 0.6 ** np.arange(size)


def unit(vector):
    return vector / np.linalg.norm(vector)


def estimated(seeds, rank=RANK, dtype=torch.float64):
    """Gives our estimate and the dense one of the same rows."""
    first, *later = (rows(seed) for seed in seeds)
    ours, dense = LowRankFisher.of(torch.tensor(first, dtype=dtype), rank), Dense(first, rank)
    for each in later:
        ours.update(torch.tensor(each, dtype=dtype), ETA)
        dense.update(each, ETA)
    return ours, dense


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 4.0])
def test_the_inverse_is_that_of_dense_matrices(rank, alpha):
    ours, dense = estimated(range(6), rank)
    new = rows(100)
    found = ours.preconditioned(torch.tensor(new), alpha).numpy()
    np.testing.assert_allclose(unit(found), unit(dense.preconditioned(new, alpha)), atol=1e-9)


def test_directions_are_orthonormal_and_the_trace_is_kept():
    ours, dense = estimated(range(12))
    torch.testing.assert_close(ours.basis @ ours.basis.T, torch.eye(RANK, dtype=torch.float64))
    assert float(ours.trace) == pytest.approx(np.trace(dense.fisher), rel=1e-9)
    whole = sum(
        ETA ** (turn > 0) * (1 - ETA) ** (11 - turn) * np.trace(rows(turn).T @ rows(turn)) / 20
        for turn in range(12)
    )
    assert float(ours.trace) == pytest.approx(whole, rel=1e-3)  # but for what the least values are raised by


def test_the_same_rows_again_and_again_give_their_largest_eigenvalues():
    new = rows(5, many=40)
    ours = LowRankFisher.of(torch.tensor(new), RANK)
    for _ in range(400):
        ours.update(torch.tensor(new), 0.5)
    exact = np.linalg.eigvalsh(new.T @ new / len(new))[::-1]
    found = (ours.spectrum[:-1] + ours.spectrum[-1]).numpy()
    np.testing.assert_allclose(found, exact[:RANK], rtol=1e-6)
    assert float(ours.spectrum[-1]) == pytest.approx(exact[RANK:].mean(), rel=1e-6)


def test_rows_of_less_than_full_rank_do_no_harm():
    flat = torch.zeros(7, SIZE)
    flat[:, 0] = 1.0
    ours = LowRankFisher.of(flat, RANK)
    ours.update(flat, ETA)
    torch.testing.assert_close(ours.basis @ ours.basis.T, torch.eye(RANK), atol=1e-5, rtol=0)
    assert torch.isfinite(ours.preconditioned(torch.ones(2, SIZE), ALPHA)).all()


def rows_that_sum_to_nothing(seed, many=20, size=SIZE):
    """Gives rows as the gradients of a softmax are."""
    whole = rows(seed, many, size)
    return whole - whole.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("rank", [2, 4])
def test_rows_that_sum_to_nothing_do_not_find_the_first_basis_even(rank):
    """It would hold the one direction that none of them has."""
    new = rows_that_sum_to_nothing(2)
    ours, dense = LowRankFisher.of(torch.tensor(new), rank), Dense(new, rank)
    found = ours.preconditioned(torch.tensor(new), ALPHA).numpy()
    np.testing.assert_allclose(unit(found), unit(dense.preconditioned(new)), atol=1e-9)
    short = LowRankFisher.of(torch.tensor(new, dtype=torch.float32), rank)
    found = short.preconditioned(torch.tensor(new, dtype=torch.float32), ALPHA).numpy()
    np.testing.assert_allclose(unit(found), unit(dense.preconditioned(new)), atol=1e-4)


@pytest.mark.parametrize("rank", [4, 8])
def test_rows_of_fewer_directions_than_the_rank_leave_nothing_to_chance(rank):
    """What the first basis has beside theirs stays, and is not what rounding makes of nothing."""
    new = np.zeros((20, SIZE))
    new[:, 3:6] = rows(6, size=3)
    ours, dense = LowRankFisher.of(torch.tensor(new, dtype=torch.float32), rank), Dense(new, rank)
    later = rows(7)
    found = ours.preconditioned(torch.tensor(later, dtype=torch.float32), 0.0).numpy()
    np.testing.assert_allclose(unit(found), unit(dense.preconditioned(later, 0.0)), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_value_is_below_a_share_of_the_largest(dtype):
    """Neither those of the directions that are told apart nor that of the rest; each is raised by itself."""
    new = np.zeros((6, SIZE))
    new[:, 0], new[:, 1] = 1.0, 1e-3
    ours = LowRankFisher.of(torch.tensor(new, dtype=dtype), RANK)
    for _ in range(20):
        ours.update(torch.tensor(new, dtype=dtype), 0.5)
    np.testing.assert_allclose(ours.spectrum[1:].double(), 5e-4, rtol=1e-2)
    assert float(ours.spectrum[0]) == pytest.approx(1.0, rel=1e-2)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 1))


def gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(each.shape, generator=generator) for each in parameters]


def take(optimizer, parameters, steps=6):
    """Takes steps with random gradients; gives by how much each parameter moved, step by step."""
    moved = []
    for step in range(steps):
        before = [each.detach().clone() for each in parameters]
        for each, gradient in zip(parameters, gradients(parameters, step), strict=True):
            each.grad = gradient
        optimizer.step()
        moved.append([each.detach() - was for each, was in zip(parameters, before, strict=True)])
    return moved


def test_every_step_is_as_long_as_the_gradient_and_goes_where_dense_matrices_say():
    """Renewed in every step, after it has been used."""
    model = network()
    parameters = list(model.parameters())
    optimizer = build("optimizer", "ngsgd(lr=0.5, momentum=0, rank=2)", FOLDER).create(parameters)
    moved = take(optimizer, parameters)
    for at, parameter in enumerate(parameters):
        dense = None
        for step, found in enumerate(moved):
            gradient = gradients(parameters, step)[at].double().numpy()
            if parameter.ndim == 1:
                expected = gradient
            else:
                matrix = gradient.reshape(len(gradient), -1)
                expected = matrix
                if min(matrix.shape) > 1:
                    sides = (matrix.T, matrix)
                    dense = dense or [Dense(side, min(2, side.shape[1] - 1)) for side in sides]
                    expected = dense[1].preconditioned(dense[0].preconditioned(matrix.T).T)
                    if step:
                        for side, new in zip(dense, sides, strict=True):
                            side.update(new, ETA)
                expected = expected * np.linalg.norm(matrix) / np.linalg.norm(expected)
            wanted = -0.5 * expected.reshape(parameter.shape)
            np.testing.assert_allclose(
                found[at].numpy(), wanted, atol=2e-4, err_msg=f"parameter {at}, step {step}"
            )


@pytest.mark.parametrize("options", ["momentum=0", "momentum=0.9", "momentum=0.9, weight_decay=0.1"])
def test_without_a_fisher_matrix_it_is_sgd_bit_for_bit(options):
    natural, plain = network(), network()
    for model, kind in ((natural, "ngsgd(rank=0, "), (plain, "sgd(")):
        parameters = list(model.parameters())
        take(build("optimizer", f"{kind}lr=0.1, {options})", FOLDER).create(parameters), parameters)
    for one, other in zip(natural.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_flat_vector_and_a_resumed_one_come_out_as_separate_tensors_do():
    spec = "ngsgd(lr=0.1, rank=3, update_every=2)"
    model, other = network(), network()
    parameters = list(model.parameters())
    take(build("optimizer", spec, FOLDER).create(parameters), parameters, steps=14)
    flat = FlatParameters(other)
    plan = OptimizerPlan.of(build("optimizer", spec, FOLDER).create(other.parameters()), flat)
    plan = OptimizerPlan.from_json(plan.to_json())
    optimizer = plan.build(flat.vector)
    for step in range(14):
        if step == 7:
            saved = optimizer.state()
            optimizer = plan.build(flat.vector)
            optimizer.load_state(saved)
        found = gradients(parameters, step)
        optimizer.step(torch.cat([each.reshape(-1) for each in found]), 0.1)
    assert torch.equal(flat.vector, torch.cat([each.detach().reshape(-1) for each in parameters]))


def test_a_gradient_of_nothing_moves_nothing():
    model = network()
    optimizer = build("optimizer", "ngsgd(momentum=0)", FOLDER).create(model.parameters())
    before = [each.detach().clone() for each in model.parameters()]
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
