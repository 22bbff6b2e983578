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


def test_the_model_keeps_working():
    model, untouched = perceptron(), perceptron()
    flat = FlatParameters(model)
    pictures = torch.randn(7, 3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(model(pictures), untouched(pictures))
    backward(model)
    backward(untouched)
    expected = torch.cat([p.grad.reshape(-1) for p in untouched.parameters()])
    assert torch.equal(flat.gradients, expected)
    assert all(view.holds_gradient() for view in flat.views)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert torch.equal(flat.vector, torch.zeros(44))


def test_gradients_add_up_until_they_are_zeroed():
    flat = FlatParameters(model := perceptron())
    backward(model)
    once = flat.gradients.clone()
    backward(model)
    torch.testing.assert_close(flat.gradients, 2 * once)
    flat.set_tail(3.0, 1.0)
    flat.zero_gradients()
    assert torch.equal(flat.gradients_and_tail, torch.zeros(44 + TAIL))


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


def test_a_parameter_without_a_gradient_gathers_zeros():
    flat = FlatParameters(model := perceptron())
    backward(model)
    model[0].bias.grad = None
    flat.gather_gradients()
    assert torch.equal(flat.gradients[15:20], torch.zeros(5))
    assert flat.gradients[:15].abs().min() > 0


def test_the_tail_is_outside_the_parameters():
    flat = FlatParameters(perceptron())
    before = flat.vector.clone()
    flat.set_tail(0.75, 1.0)
    assert flat.tail() == (0.75, 1.0)
    assert flat.gradients_and_tail[44:].tolist() == [0.75, 1.0]
    assert torch.equal(flat.gradients, torch.zeros(44))
    flat.vector_and_tail[-1] = 5.0
    assert torch.equal(flat.vector, before)


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


def test_buckets_count_bytes_and_not_numbers():
    double = FlatParameters(perceptron().double(), 8 * 26)
    assert [(bucket.start, bucket.stop) for bucket in double.buckets] == [(20, 46), (0, 20)]


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


def test_another_has_the_same_places_in_memory_of_its_own():
    flat = FlatParameters(perceptron(), bucket_bytes=64)
    flat.gradients.fill_(3.0)
    made = flat.another()
    assert made.size == flat.size
    assert made.buckets == flat.buckets
    assert [(view.name, view.start, view.stop) for view in made.views] == [
        (view.name, view.start, view.stop) for view in flat.views
    ]
    assert not made.vector_and_tail.any()
    assert not made.gradients_and_tail.any()
    before = flat.vector.clone()
    for number, view in enumerate(made.views, 1):
        assert view.parameter.shape == flat.views[number - 1].parameter.shape
        view.parameter.data.fill_(number)
        view.parameter.grad.fill_(-number)
        assert made.vector[view.start : view.stop].eq(number).all()
        assert made.gradients[view.start : view.stop].eq(-number).all()
    made.set_tail(2.0, 1.0)
    assert made.gradients_and_tail[-2:].tolist() == [2.0, 1.0]
    assert torch.equal(flat.vector, before)
    assert flat.gradients.eq(3.0).all()
    assert flat.tail() == (0.0, 0.0)


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


def test_shards_of_seven_numbers():
    assert shards(7, 3) == [slice(0, 2), slice(2, 4), slice(4, 7)]


def test_the_first_bucket_is_smaller_where_the_others_are_large():
    model = nn.ParameterList([torch.zeros(200_000) for _ in range(12)])  # of 0.8 MB each
    buckets = FlatParameters(model).buckets
    assert [len(bucket.parameters) for bucket in buckets] == [2, 6, 4]  # MiB: 1.5, 4.6 and the rest
