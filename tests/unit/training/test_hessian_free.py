"""Hessian-free steps against dense solves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.joint_optimizer import Pass, random_state, same_random_numbers
from polyrhythm.training.joint_optimizers.hessian_free import ConjugateGradientOptimizer, HessianFree

CLASSES = 3


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(4)
    hidden: list[nn.Module] = [nn.Linear(5, 4)]
    if norm:
        hidden.append(nn.BatchNorm1d(4))
    return nn.Sequential(*hidden, nn.Tanh(), nn.Linear(4, CLASSES)).double()


def batch(count: int = 30) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 5, dtype=torch.float64), torch.randint(CLASSES, (count,))


def vector(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def by_hand(
    vector: Tensor, model: nn.Module, images: Tensor, labels: Tensor, decay: float
) -> tuple[Tensor, ...]:
    """Gives loss, gradient and Gauss-Newton matrix, dense, at a vector."""
    shapes = {name: value.shape for name, value in model.named_parameters()}

    def scores(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        found: Tensor = functional_call(model, values, (images,))
        return found

    flat = vector.clone().requires_grad_()
    loss = functional.cross_entropy(scores(flat), labels) + decay / 2 * flat.square().sum()
    (gradient,) = torch.autograd.grad(loss, flat)
    jacobian = jacrev(scores)(vector)
    likely = scores(vector).softmax(1)
    bent = torch.diag_embed(likely) - likely.unsqueeze(2) * likely.unsqueeze(1)
    curvature = torch.einsum("bkn,bkl,blm->nm", jacobian, bent, jacobian) / len(images)
    return loss.detach(), gradient, curvature + decay * torch.eye(len(vector), dtype=torch.float64)


def reference(model: nn.Module, steps: int, rate: float, decay: float) -> tuple[Tensor, list[float]]:
    """Gives where dense solves lead, with the paper's line search and its rule for the damping, and the dampings."""
    images, labels = batch()
    at, damping, dampings = vector(model), 0.3, []
    for _ in range(steps):
        loss, gradient, curvature = by_hand(at, model, images, labels, decay)
        direction = torch.linalg.solve(
            curvature + damping * torch.eye(len(at), dtype=torch.float64), -gradient
        )
        whole = rate * direction
        promised = gradient @ whole + whole @ curvature @ whole / 2
        fraction = (by_hand(at + whole, model, images, labels, decay)[0] - loss) / promised
        scale = 1.0
        while (
            by_hand(at + scale * whole, model, images, labels, decay)[0]
            > loss + 0.01 * scale * gradient @ whole
        ):
            scale *= 0.8
        at = at + scale * whole
        damping *= 1.5 if fraction < 0.25 else 2 / 3 if fraction > 0.75 else 1.0
        dampings.append(damping)
    return at, dampings


def trained(model: nn.Module, steps: int, rate: float, pieces: int = 1, **keys: object) -> list[float]:
    """Takes steps on one batch; gives the dampings."""
    images, labels = batch()
    optimizer = HessianFree(damping=0.3, **keys).create(model.parameters())
    assert isinstance(optimizer, ConjugateGradientOptimizer)
    flat = FlatParameters(model)
    optimizer.tie(model)
    dampings = []
    for number in range(steps):
        optimizer.begin(number, seed=0)
        flat.zero_gradients()
        for part, truth in zip(images.tensor_split(pieces), labels.tensor_split(pieces), strict=True):

            def loss(found: Tensor, truth: Tensor = truth) -> Tensor:
                return functional.cross_entropy(found, truth)

            scores = model(part)
            optimizer.observe(scores, Pass(len(part), lambda part=part: model(part), loss))
            (loss(scores) * len(part) / len(images)).backward()
        optimizer.update(flat, rate)
        dampings.append(optimizer.param_groups[0]["damping"])
    return dampings


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(("rate", "decay"), [(1.0, 0.0), (1.0, 0.01), (0.5, 0.0)])
def test_steps_are_those_of_dense_solves(rate: float, decay: float, pieces: int) -> None:
    expected, dampings = reference(network(), 6, rate, decay)
    model = network()
    found = trained(model, 6, rate, pieces, weight_decay=decay, iterations=400, tolerance=0, warm=0)
    torch.testing.assert_close(vector(model), expected, rtol=1e-6, atol=1e-8)
    assert found == pytest.approx(dampings)
    assert len(set(found)) > 1


def test_a_warm_start_solves_the_same_system() -> None:
    found = []
    for warm in (0.0, 0.9):
        model = network()
        trained(model, 4, 1.0, iterations=400, tolerance=0, warm=warm)
        found.append(vector(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)


def test_fewer_iterations_follow_the_gradient() -> None:
    """One iteration is a step along the gradient, as long as the quadratic model's least value is away."""
    model = network()
    images, labels = batch()
    before = vector(model)
    _, gradient, curvature = by_hand(before, model, images, labels, 0.0)
    trained(model, 1, 1.0, iterations=1)
    length = gradient @ gradient / (gradient @ curvature @ gradient + 0.3 * gradient @ gradient)
    torch.testing.assert_close(vector(model), before - length * gradient)


def test_passes_for_products_leave_the_statistics_of_batch_norm() -> None:
    model, plain = network(norm=True), network(norm=True)
    plain(batch()[0])
    trained(model, 1, 1.0)
    for (name, found), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), name


def test_a_pass_is_repeated_with_its_random_numbers() -> None:
    device = torch.device("cpu")
    torch.manual_seed(0)
    state = random_state(device)
    first = torch.rand(3)
    following = random_state(device)
    with same_random_numbers(state, device):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(random_state(device), following)
