"""The running mean of the weights against numbers computed by hand."""

import pytest
import torch

from polyrhythm.errors import RequestError
from polyrhythm.training.weight_averaging import WeightAverage


def test_without_ramp_follows_the_rule():
    average = WeightAverage(torch.tensor([0.0, 8.0]), decay=0.75, ramp=False)
    average.update(torch.tensor([4.0, 8.0]))
    assert average.value.tolist() == [1.0, 8.0]
    average.update(torch.tensor([5.0, 0.0]))
    assert average.value.tolist() == [2.0, 6.0]


def test_the_ramp_starts_at_a_tenth_and_ends_at_the_decay():
    average = WeightAverage(torch.zeros(1, dtype=torch.float64), decay=0.3)
    kept = []
    for _ in range(5):
        average.value.fill_(1)
        average.update(torch.zeros(1, dtype=torch.float64))
        kept.append(average.value.item())
    assert kept == pytest.approx([1 / 10, 2 / 11, 3 / 12, 0.3, 0.3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_constant_weights_stay_bit_for_bit(dtype):
    weights = torch.randn(1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    average = WeightAverage(weights, decay=0.999)
    for _ in range(50):
        average.update(weights)
    assert torch.equal(average.value, weights)
    assert average.value.dtype == dtype


def test_no_decay_takes_the_weights_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    average = WeightAverage(1e6 * torch.randn(1001, generator=generator), decay=0.0)
    weights = torch.randn(1001, generator=generator)
    average.update(weights)
    assert torch.equal(average.value, weights)


def test_works_in_place_and_alone():
    weights = torch.zeros(3, requires_grad=True)
    average = WeightAverage(weights, decay=0.5, ramp=False)
    place = average.value.data_ptr()
    average.update(torch.ones(3, requires_grad=True))
    assert average.value.data_ptr() == place
    assert not average.value.requires_grad
    assert torch.equal(weights, torch.zeros(3))


def test_a_loaded_average_goes_on_the_same():
    weights = [torch.randn(7, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    whole, first = WeightAverage(weights[0], decay=0.9), WeightAverage(weights[0], decay=0.9)
    for step in weights[:4]:
        whole.update(step)
        first.update(step)
    second = WeightAverage(torch.zeros(7), decay=0.9)
    second.load_state_dict(first.state_dict())
    for step in weights[4:]:
        whole.update(step)
        second.update(step)
    assert torch.equal(second.value, whole.value)
    assert second.updates == 8


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_refuses_a_decay_out_of_range(decay):
    with pytest.raises(RequestError, match="out of range"):
        WeightAverage(torch.zeros(1), decay)


def test_refuses_another_shape():
    average = WeightAverage(torch.zeros(3), 0.9)
    with pytest.raises(ValueError, match="shape"):
        average.update(torch.zeros(1))
