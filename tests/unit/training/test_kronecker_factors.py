"""K-FAC against dense Gauss-Newton matrices, and its factors against sums over single images and places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.joint_optimizer import Pass
from polyrhythm.training.joint_optimizers.kfac import KFAC, KroneckerOptimizer, gram, layers_of, shared_out

CLASSES = 4


def stepped(
    model: nn.Module, images: Tensor, labels: Tensor, rate: float = 1.0, **keys: object
) -> KroneckerOptimizer:
    """Takes one step of K-FAC on a batch."""
    optimizer = KFAC(momentum=0, clip=0, **keys).create(model.parameters())
    assert isinstance(optimizer, KroneckerOptimizer)
    flat = FlatParameters(model)
    optimizer.tie(model)
    optimizer.begin(0, seed=3)
    scores = model(images)
    loss = functional.cross_entropy(scores, labels)
    optimizer.observe(
        scores, Pass(len(labels), lambda: model(images), lambda z: functional.cross_entropy(z, labels))
    )
    loss.backward()
    optimizer.update(flat, rate)
    return optimizer


def gauss_newton(model: nn.Module, images: Tensor) -> Tensor:
    """Gives the mean of J^T H J over single images, J by all parameters in their order."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    total = torch.zeros((), dtype=images.dtype)
    for image in images:

        def scores(values: dict[str, Tensor], image: Tensor = image) -> Tensor:
            found: Tensor = functional_call(model, values, (image[None],))[0]
            return found

        jacobian = torch.cat([each.flatten(1) for each in jacrev(scores)(parameters).values()], 1)
        likely = scores(parameters).softmax(0)
        total = total + jacobian.T @ (likely.diag() - likely.outer(likely)) @ jacobian / len(images)
    return total


def batch(*shape: int, count: int = 24) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, *shape, dtype=torch.float64), torch.randint(CLASSES, (count,))


def gradient_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(images), labels)
    return torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(model.parameters()))])


def vector(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.parametrize("bias", [True, False])
def test_on_a_linear_net_a_step_is_that_of_gauss_newton(bias: bool) -> None:
    """At zero weights all images have the same probabilities, so that the product of means is the mean of products."""
    images, labels = batch(5)
    model = nn.Sequential(nn.Linear(5, CLASSES, bias=bias)).double()
    for each in model.parameters():
        nn.init.zeros_(each)
    curvature, gradient, damping = gauss_newton(model, images), gradient_of(model, images, labels), 0.07
    expected = -0.5 * torch.linalg.solve(
        curvature + damping * torch.eye(len(gradient), dtype=torch.float64), gradient
    )
    stepped(model, images, labels, 0.5, damping=damping, fisher="exact")
    torch.testing.assert_close(vector(model), expected, rtol=1e-10, atol=1e-12)


def test_in_a_deep_linear_net_each_layers_step_is_that_of_its_own_block() -> None:
    """The first hidden unit alone sees the images, and no class sees it: all images have the same probabilities."""
    images, labels = batch(5)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, CLASSES)).double()
    with torch.no_grad():
        model[0].weight[1:] = 0
        model[1].weight[:, 0] = 0
    curvature, gradient, damping = gauss_newton(model, images), gradient_of(model, images, labels), 0.02
    before = vector(model)
    first = sum(each.numel() for each in model[0].parameters())
    expected = before.clone()
    for place in (slice(0, first), slice(first, None)):
        block = curvature[place, place]
        assert float(block.abs().max()) > 0.01
        expected[place] -= torch.linalg.solve(
            block + damping * torch.eye(len(block), dtype=torch.float64), gradient[place]
        )
    stepped(model, images, labels, damping=damping, fisher="exact")
    torch.testing.assert_close(vector(model), expected, rtol=1e-10, atol=1e-12)


class Convolution(nn.Module):
    """A convolution whose outputs are changed in place, and a linear layer over places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(1, 0))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        found = functional.relu(self.conv(images), inplace=True)
        return self.head(found.flatten(2).transpose(1, 2)).mean(1)


def test_factors_are_sums_over_single_images_and_places() -> None:
    images, labels = batch(2, 4, 5, count=6)
    model = Convolution().double()
    state = stepped(model, images, labels, rate=1e-300, fisher="empirical").state
    kernel = model.conv
    before, after, patches = torch.zeros(13, 13), torch.zeros(3, 3), 0
    heads_before, heads_after = torch.zeros(4, 4), torch.zeros(CLASSES, CLASSES)
    before, after, heads_before, heads_after = (
        each.double() for each in (before, after, heads_before, heads_after)
    )
    for image, label in zip(images, labels, strict=True):
        padded = functional.pad(image, (0, 0, 1, 1))
        outputs = kernel(image[None])
        hidden = outputs.relu().flatten(2).transpose(1, 2)
        scores = model.head(hidden)
        loss = functional.cross_entropy(scores.mean(1), label[None])
        by_output, by_score = torch.autograd.grad(loss, [outputs, scores])
        rows, columns = outputs.shape[2:]
        patches = rows * columns
        for row in range(rows):
            for column in range(columns):
                patch = padded[:, row : row + 2, 2 * column : 2 * column + 3].reshape(-1)
                patch = torch.cat([patch, torch.ones(1)])
                before += patch.outer(patch) / len(images)
                slope = by_output[0, :, row, column]
                after += slope.outer(slope) / (patches * len(images))
        for place in range(patches):
            seen = torch.cat([hidden[0, place], torch.ones(1)]).detach()
            heads_before += seen.outer(seen) / len(images)
            heads_after += by_score[0, place].outer(by_score[0, place]) / (patches * len(images))
    for found, expected in (
        (state[kernel.weight]["inputs"], before),
        (state[kernel.weight]["outputs"], after),
        (state[model.head.weight]["inputs"], heads_before),
        (state[model.head.weight]["outputs"], heads_after),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_are_unfolds_patches(bias: bool) -> None:
    torch.manual_seed(0)
    keys = {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2)}
    module = nn.Conv2d(3, 2, (3, 2), bias=bias, **keys)
    images = torch.randn(4, 3, 7, 8).to(memory_format=torch.channels_last)
    (layer,) = layers_of(module, list(module.parameters()), 100)
    expected = functional.unfold(images, (3, 2), **keys).transpose(1, 2).reshape(-1, 18)
    found = layer.rows(images)
    assert torch.equal(found[:, :18], expected)
    assert found.shape[1] == 18 + bias
    assert bool((found[:, 18:] == 1).all())


@pytest.mark.parametrize("shape", [(700, 300), (600, 512), (40, 300), (900, 12)])
def test_a_product_by_blocks_is_the_whole_one(shape: tuple[int, int]) -> None:
    rows = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = gram(rows)
    torch.testing.assert_close(found, rows.T @ rows, rtol=1e-12, atol=1e-11)
    assert torch.equal(found, found.T)


def test_the_mean_over_drawn_labels_is_the_expectation() -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 5).double()
    images, labels = image.expand(20_000, 5), torch.zeros(20_000, dtype=torch.int64)
    found = {}
    for fisher in ("sampled", "exact"):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, CLASSES)).double()
        found[fisher] = stepped(model, images, labels, fisher=fisher).state[model[0].weight]["outputs"]
    torch.testing.assert_close(found["sampled"], found["exact"], rtol=0, atol=0.01)
    assert float(found["exact"].diagonal().min()) > 0.02


def test_a_step_is_no_longer_than_the_clip() -> None:
    """By the quadratic model: lr^2 P.W' = clip."""
    images, labels = batch(5)
    moved = []
    for clip in (0.0, 1e-4):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(5, CLASSES)).double()
        gradient = gradient_of(model, images, labels)
        optimizer = KFAC(momentum=0, clip=clip, fisher="exact").create(model.parameters())
        flat = FlatParameters(model)
        before = vector(model)
        optimizer.tie(model)
        optimizer.begin(0, seed=0)
        scores = model(images)
        optimizer.observe(scores, Pass(len(labels), lambda found=scores: found, lambda z: z.sum()))
        functional.cross_entropy(scores, labels).backward()
        optimizer.update(flat, 0.5)
        moved.append(before - vector(model))
    assert float(0.5 * moved[0] @ gradient) > 1e-3
    shorter = float(torch.linalg.vector_norm(moved[1]) / torch.linalg.vector_norm(moved[0]))
    torch.testing.assert_close(moved[1], moved[0] * shorter)
    assert float(0.5 * moved[0] @ gradient) * shorter**2 == pytest.approx(1e-4)


def test_what_has_no_factors_takes_its_plain_gradient() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, groups=2),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(8, 40),
        nn.Linear(40, CLASSES),
    ).double()
    found = layers_of(model, list(model.parameters()), largest=40)
    assert [layer.module for layer in found] == [model[3]]  # the last has 41 rows with its bias
    images, labels = batch(2, 4, 4, count=8)
    expected = model[0].weight.detach() - 0.1 * gradient_of(model, images, labels)[:18].view(2, 1, 3, 3)
    stepped(model, images, labels, 0.1, largest=40)
    torch.testing.assert_close(model[0].weight.detach(), expected)


def test_a_weight_of_two_layers_has_no_factors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert layers_of(model, list(model.parameters()), 100) == []


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_decompositions_are_shared_out_by_their_operations(workers: int) -> None:
    sizes = [10, 300, 20, 200, 200, 200, 5]
    owners = shared_out(sizes, workers)
    work = [
        sum(size**3 for size, owner in zip(sizes, owners, strict=True) if owner == each)
        for each in range(workers)
    ]
    assert sum(work) == sum(size**3 for size in sizes)
    # Graham's bound for the largest first: four thirds of the best, which no worker can beat.
    assert max(work) <= 4 / 3 * max(300**3, sum(work) / workers)
