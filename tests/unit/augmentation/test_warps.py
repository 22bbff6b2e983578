"""Warps, against scipy's sampling at points that are worked out here by other code."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import BYTES, UNIT
from polyrhythm.augmentation.transforms.lens_distortion import LensDistortion
from polyrhythm.augmentation.transforms.rotation import Rotation
from polyrhythm.augmentation.transforms.stretching import Stretching
from polyrhythm.augmentation.warp import warp

HEIGHT, WIDTH = 13, 18
CENTRE = np.array([(HEIGHT - 1) / 2, (WIDTH - 1) / 2])
HALF_DIAGONAL = np.hypot(*CENTRE)


def turned(y, x, angle):
    return y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)


def stretched(y, x, wider, higher):
    return y / math.exp(higher), x / math.exp(wider)


def distorted(y, x, k):
    squared = (x * x + y * y) / HALF_DIAGONAL**2
    return y * (1 + k * squared), x * (1 + k * squared)


CASES = {
    "rotation": (Rotation(), turned, (0.4,)),
    "stretching": (Stretching(), stretched, (0.2, -0.1)),
    "barrel": (LensDistortion(), distorted, (0.3,)),
    "pincushion": (LensDistortion(), distorted, (-0.3,)),
}


@pytest.mark.parametrize(("kind", "map_back", "parameters"), CASES.values(), ids=CASES.keys())
def test_a_warp_is_scipys(kind, map_back, parameters):
    image = torch.rand(1, 2, HEIGHT, WIDTH, dtype=torch.float64)
    result = warp(image, [(kind, torch.tensor([parameters], dtype=torch.float64))])
    rows, columns = np.mgrid[:HEIGHT, :WIDTH].astype(float)
    y, x = map_back(rows - CENTRE[0], columns - CENTRE[1], *parameters)
    for channel in range(2):
        # grid-constant: zeros are sampled like any pixel, so that edges fade as ours do.
        there = map_coordinates(
            image[0, channel].numpy(), [y + CENTRE[0], x + CENTRE[1]], order=1, mode="grid-constant"
        )
        np.testing.assert_allclose(result[0, channel].numpy(), there, atol=1e-9)


def test_a_quarter_turn_is_exact():
    image = torch.arange(9.0).view(1, 1, 3, 3)
    result = warp(image, [(Rotation(), torch.tensor([[math.pi / 2]]))])
    torch.testing.assert_close(result, image.rot90(1, (2, 3)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [0.3, -0.3])
def test_the_center_stays_under_a_lens(k):
    image = torch.rand(1, 3, 9, 9)
    result = warp(image, [(LensDistortion(), torch.tensor([[k]]))])
    assert torch.equal(result[..., 4, 4], image[..., 4, 4])


def test_bytes_are_rounded():
    image = torch.tensor([[[[0, 255, 0]]]], dtype=torch.uint8)
    result = warp(image, [(Stretching(), torch.tensor([[math.log(2.0), 0.0]]))])
    assert result.tolist() == [[[[128, 255, 128]]]]  # 127.5, to even


@pytest.mark.parametrize(
    ("fill", "expected"), [("zero", [1, 1, 0]), ("border", [1, 1, 1]), ("reflect", [1, 1, 1])]
)
def test_what_comes_in_from_outside(fill, expected):
    image = torch.ones(1, 1, 1, 3)
    shrunk = warp(image, [(Stretching(), torch.tensor([[math.log(0.5), 0.0]]))], fill)
    # The outermost pixels now show what was twice as far from the center: 2 pixels, where the image ends at 1.
    assert shrunk[0, 0, 0].tolist() == [expected[2], 1, expected[2]]


def test_drawn_parameters_are_within_strength():
    draws = Draws(torch.arange(5000))
    angles = Rotation(strength=10).draw(draws)
    assert -math.radians(10) <= angles.min() < -math.radians(9.9)
    assert math.radians(9.9) < angles.max() <= math.radians(10)
    factors = Stretching(strength=0.5).draw(draws).exp()
    assert 1 / 1.5 <= factors.min() < 0.68
    assert 1.49 < factors.max() <= 1.5
    assert LensDistortion(strength=0.1).draw(draws).abs().max() <= 0.1


def test_probability_is_the_share_of_moved_images():
    images = torch.rand(2000, 1, 5, 5)
    moved = Rotation(probability=0.25)(images, Draws(torch.arange(2000)), UNIT)
    share = (moved != images).flatten(1).any(1).double().mean().item()
    assert share == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_flip_after_a_warp_is_mirrored_bit_for_bit_though_it_is_sampled_once(dtype):
    images = torch.randint(0, 256, (8, 3, HEIGHT, WIDTH), dtype=torch.uint8).to(dtype)
    keys = torch.arange(8)
    for axis, dimension in (("horizontal", -1), ("vertical", -2)):
        chain = f"rotation; stretching; flip(probability=1, axis={axis})"
        turned = build_chain("rotation; stretching").on(BYTES)(images, keys)
        assert torch.equal(build_chain(chain).on(BYTES)(images, keys), turned.flip(dimension))


def test_a_flip_before_a_warp_is_what_the_warp_sees():
    images, keys = torch.rand(8, 1, HEIGHT, WIDTH, dtype=torch.float64), torch.arange(8)
    warped = build_chain("flip(probability=1); lens_distortion; stretching")(images, keys)
    draws = Draws(keys)
    draws.chance(1.0)  # the flip's
    steps = [(kind, kind.drawn(draws)) for kind in (LensDistortion(), Stretching())]
    torch.testing.assert_close(warped, warp(images.flip(-1), steps), atol=1e-12, rtol=0)


def test_pictures_that_are_only_mirrored_keep_their_bits_beside_others_that_are_turned():
    images, keys = torch.rand(64, 1, HEIGHT, WIDTH), torch.arange(64)
    result = build_chain("flip; rotation(probability=0.5)")(images, keys)
    draws = Draws(keys)
    mirrored, turned = draws.chance(0.5), draws.chance(0.5)
    assert torch.equal(result[mirrored & ~turned], images[mirrored & ~turned].flip(-1))
    assert torch.equal(result[~mirrored & ~turned], images[~mirrored & ~turned])
    assert 8 < int((mirrored & ~turned).sum()) < 32
