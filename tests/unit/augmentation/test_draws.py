import pytest
import torch

from polyrhythm.augmentation.draws import Draws

MASK = (1 << 64) - 1


def splitmix(number: int) -> int:
    """Steele, Lea, Flood's finalizer, with Python's whole numbers."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_numbers_are_splitmix(key):
    draws = Draws(torch.tensor([key]))
    state = splitmix(key & MASK)
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        assert draws.uniform().item() == (splitmix(state) >> 11) / 2**53


def test_numbers_are_even_and_independent_of_each_other():
    draws = Draws(torch.arange(200_000))
    first, second = draws.uniform(), draws.uniform()
    shares = torch.histc(first.float(), 20, 0, 1) / len(first)
    torch.testing.assert_close(shares, torch.full((20,), 0.05), atol=0.003, rtol=0)
    for other in (second, first.roll(1)):
        assert abs(torch.corrcoef(torch.stack((first, other)))[0, 1].item()) < 0.01


def test_integers_reach_both_ends_evenly():
    drawn = Draws(torch.arange(90_000)).integers(-1, 1)
    shares = torch.bincount(drawn + 1) / len(drawn)
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), atol=0.006, rtol=0)


def test_chance_is_its_probability():
    draws = Draws(torch.arange(50_000))
    assert not draws.chance(0.0).any()
    assert draws.chance(1.0).all()
    assert draws.chance(0.3).double().mean().item() == pytest.approx(0.3, abs=0.01)


def test_the_draws_of_some_samples_are_those_of_all():
    whole, keys = Draws(torch.arange(10)), torch.arange(10)
    part = Draws(keys).of(slice(3, 7))
    for _ in range(4):
        assert torch.equal(part.uniform(-1, 2), whole.uniform(-1, 2)[3:7])
