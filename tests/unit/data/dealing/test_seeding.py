import pytest
import torch

from polyrhythm.data.seeding import generator_for, seed_for, seeds_for


def drawn(*key):
    return torch.rand(4, generator=generator_for(*key)).tolist()


def test_the_same_key_gives_the_same_stream():
    assert drawn("transform", 1, 2) == drawn("transform", 1, 2)


def test_keys_that_look_alike_give_different_streams():
    keys = [("a", 1, 2), ("a", 2, 1), ("a", 12), ("a", 1, 2, 0), ("a", -1, 2), ("b", 1, 2), ("a", 2**70)]
    assert len({tuple(drawn(*key)) for key in keys}) == len(keys)


@pytest.mark.parametrize("numbers", [(3,), (3, 0), (2**40, -1, 7), (torch.tensor(3), 1)])
def test_a_series_has_the_seeds_of_its_members(numbers):
    *fixed, last = numbers if len(numbers) > 1 else (*numbers, 11)
    series = seeds_for("step", *fixed)
    for number in (0, 1, 10, int(last), 2**33):
        assert series(number) == seed_for("step", *fixed, number)
