"""A model on views of one vector."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.training.flat_parameters import TAIL, FlatParameters, shards

SHAPES = [(5, 3), (5,), (4, 5), (4,)]  # a perceptron's: 15 + 5 + 20 + 4 = 44 numbers


def perceptron():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def backward(model, seed=2):
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(6, 3, generator=generator)).square().sum().backward()


def test_the_vector_holds_the_parameters_in_the_models_order():
    model, untouched = perceptron(), perceptron()
    flat = FlatParameters(model)
    assert flat.size == 44
    assert flat.nbytes == 176
    assert torch.equal(flat.vector, torch.cat([p.detach().reshape(-1) for p in untouched.parameters()]))
    assert [view.name for view in flat.views] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [(view.start, view.stop) for view in flat.views] == [(0, 15), (15, 20), (20, 40), (40, 44)]
    assert [tuple(p.shape) for p in model.parameters()] == SHAPES


def test_views_alias_both_ways():
    model = perceptron()
    flat = FlatParameters(model)
    flat.vector[15] = 7.0
    assert model[0].bias[0].item() == 7.0
    with torch.no_grad():
        model[2].weight[1, 0] = -3.0
    assert flat.vector[25].item() == -3.0
    model[2].bias.grad[3] = 11.0
    assert flat.gradients[43].item() == 11.0


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_gathered_after_zero_grad(to_none):
    model, untouched = perceptron(), perceptron()
    flat = FlatParameters(model)
    backward(model, seed=9)
    model.zero_grad(set_to_none=to_none)
    backward(model)
    backward(untouched)
    flat.gather_gradients()
    assert torch.equal(flat.gradients, torch.cat([p.grad.reshape(-1) for p in untouched.parameters()]))
    assert all(view.holds_gradient() for view in flat.views)


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [
        (4 << 20, [(0, 46, range(4))]),
        (4, [(40, 46, range(3, 4)), (20, 40, range(2, 3)), (15, 20, range(1, 2)), (0, 15, range(1))]),
        (4 * 6, [(40, 46, range(3, 4)), (20, 40, range(2, 3)), (0, 20, range(2))]),
        (4 * 26, [(20, 46, range(2, 4)), (0, 20, range(2))]),
        (4 * 27, [(15, 46, range(1, 4)), (0, 15, range(1))]),
    ],
)
def test_buckets_come_in_the_order_of_the_backward_pass(bucket_bytes, expected):
    flat = FlatParameters(perceptron(), bucket_bytes)
    assert [(bucket.start, bucket.stop, bucket.parameters) for bucket in flat.buckets] == expected


@given(
    sizes=some.lists(some.integers(1, 40), min_size=1, max_size=12),
    bucket_bytes=some.integers(1, 400),
)
def test_buckets_cover_everything_once(sizes, bucket_bytes):
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    flat = FlatParameters(model, bucket_bytes)
    backwards = list(reversed(flat.buckets))
    assert backwards[0].start == 0
    assert backwards[-1].stop == sum(sizes) + TAIL
    assert all(first.stop == second.start for first, second in pairwise(backwards))
    assert [position for bucket in backwards for position in bucket.parameters] == list(range(len(sizes)))
    big_enough = [4 * (bucket.stop - bucket.start) >= bucket_bytes // 4 * 4 for bucket in flat.buckets]
    assert all(big_enough[:-1])


def test_what_needs_no_gradient_stays_outside():
    model = perceptron()
    model[0].weight.requires_grad_(False)
    flat = FlatParameters(model)
    assert flat.size == 29
    assert [view.name for view in flat.views] == ["0.bias", "2.weight", "2.bias"]
    backward(model)
    assert model[0].weight.grad is None
    assert flat.gradients.abs().min() > 0


def test_tied_parameters_are_one():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    flat = FlatParameters(model)
    assert flat.size == 16
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model[0].weight.grad.reshape(-1), flat.gradients)
    assert model[2].weight is model[0].weight


def test_nothing_to_train_is_refused():
    model = perceptron()
    model.requires_grad_(False)
    with pytest.raises(
        RequestError, match=r"^the model has no parameter to train: let at least one require a gradient$"
    ):
        FlatParameters(model)


def test_mixed_dtypes_are_refused():
    model = perceptron()
    model[2].double()
    with pytest.raises(RequestError, match=r"mixes torch.float32 and torch.float64: convert it to one dtype"):
        FlatParameters(model)


@given(size=some.integers(1, 500), servers=some.integers(1, 60))
def test_shards_are_balanced_and_cover_the_vector(size, servers):
    if servers > size:
        with pytest.raises(
            RequestError, match=f"{servers} servers cannot share a model of {size} parameters"
        ):
            shards(size, servers)
        return
    cut = shards(size, servers)
    lengths = [shard.stop - shard.start for shard in cut]
    assert len(cut) == servers
    assert [number for shard in cut for number in range(size)[shard]] == list(range(size))
    assert max(lengths) - min(lengths) <= 1
