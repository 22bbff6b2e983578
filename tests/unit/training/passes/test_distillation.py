"""Learning from other networks, held to formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.training.objective import Objective, Teachers, Teaching, soft_loss


def _network(seed: int, side: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 3)).double()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(5, 1, 4, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])


def test_a_student_that_is_its_teacher_gets_no_soft_gradient() -> None:
    network, (images, labels) = _network(1), _batch()
    teachers = Teachers([_network(1)], [4], Teaching(temperature=3.0, share=1.0))
    Objective(teachers=teachers)(network(images), labels, images).backward()
    assert network[1].weight.grad.abs().max() < 1e-12


def test_the_gradient_is_temperature_times_the_difference_and_tends_to_that_of_logits() -> None:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(1, 6, generator=generator, dtype=torch.float64).requires_grad_()
    v = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    for temperature in (1.0, 4.0, 100.0):
        (gradient,) = torch.autograd.grad(soft_loss(z, (v / temperature).softmax(1), temperature), z)
        p, q = (z / temperature).softmax(1), (v / temperature).softmax(1)
        torch.testing.assert_close(gradient, temperature * (p - q))
    limit = ((z - z.mean()) - (v - v.mean())) / 6
    assert ((gradient - limit).abs() / limit.abs().max()).max() < 0.01


def test_the_loss_is_the_formula_with_the_mean_of_the_teachers() -> None:
    student, (images, labels) = _network(1), _batch()
    first, second = _network(2), _network(3)
    teachers = Teachers([first, second], [4, 4], Teaching(temperature=2.0, share=0.6))
    logits = student(images)
    q = ((first(images) / 2).softmax(1) + (second(images) / 2).softmax(1)) / 2
    kl = (q * (q.log() - (logits / 2).log_softmax(1))).sum(1).mean()
    expected = 0.4 * functional.cross_entropy(logits, labels) + 0.6 * 4 * kl
    torch.testing.assert_close(Objective(teachers=teachers)(logits, labels, images), expected)
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_branches_learn_each_from_the_teachers() -> None:
    student, (images, labels) = _network(1), _batch()
    objective = Objective(teachers=Teachers([_network(2)], [4], Teaching()))
    logits = student(images)
    twice = torch.stack([logits, logits], 1)
    torch.testing.assert_close(objective(twice, labels, images), 2 * objective(logits, labels, images))


def test_a_teacher_of_another_picture_size_sees_that_size() -> None:
    images, _ = _batch()
    large = _network(4, side=8)
    found = Teachers([large], [8], Teaching(temperature=1.0)).probabilities(images)
    seen = functional.interpolate(images, (8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(found, large(seen).softmax(1))


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(RequestError, match="temperature 0 is not above 0"):
        Teaching(temperature=0)
    with pytest.raises(RequestError, match="is not a share"):
        Teaching(share=1.5)
