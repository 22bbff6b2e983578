import torch

from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import UNIT
from polyrhythm.augmentation.transforms.flip import Flip, flip


def changed(transform, images, seed: int = 0):
    return transform(images, Draws(torch.arange(len(images)) + 1000 * seed), UNIT)


def test_only_the_marked_images_are_mirrored():
    images = torch.arange(8.0).view(2, 1, 2, 2)
    result = flip(images, torch.tensor([False, True]))
    assert result.tolist() == [[[[0, 1], [2, 3]]], [[[5, 4], [7, 6]]]]


def test_flipping_twice_is_the_identity():
    images = torch.randn(6, 3, 5, 4)
    mirrored = torch.rand(6) < 0.5
    assert torch.equal(flip(flip(images, mirrored), mirrored), images)


def test_probability_zero_is_the_identity_and_one_mirrors_all():
    images = torch.randn(100, 1, 3, 3)
    assert torch.equal(changed(Flip(probability=0), images), images)
    assert torch.equal(changed(Flip(probability=1), images), images.flip(-1))


def test_the_share_of_mirrored_images_is_the_probability():
    images = torch.tensor([0.0, 1.0]).expand(10_000, 1, 1, 2)
    share = changed(Flip(probability=0.3), images)[:, 0, 0, 0].mean().item()
    assert abs(share - 0.3) < 0.02


def test_same_seed_same_picture():
    images = torch.randn(64, 1, 4, 4)
    assert torch.equal(changed(Flip(), images, 3), changed(Flip(), images, 3))
    assert not torch.equal(changed(Flip(), images, 3), changed(Flip(), images, 4))


def test_an_empty_batch_stays_empty():
    assert changed(Flip(), torch.zeros(0, 3, 8, 8)).shape == (0, 3, 8, 8)


def test_a_vertical_flip_turns_upside_down():
    images = torch.randn(4, 1, 3, 3)
    assert torch.equal(changed(Flip(probability=1, axis="vertical"), images), images.flip(-2))
