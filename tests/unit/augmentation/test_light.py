"""Color casting and vignetting: what changes the light and moves no pixel."""

import numpy as np
import pytest
import torch

from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import BYTES, UNIT, Tones
from polyrhythm.augmentation.transforms.color_casting import ColorCasting, cast_color
from polyrhythm.augmentation.transforms.vignetting import Vignetting, vignette


def test_channels_are_shifted_and_clipped():
    image = torch.tensor([10, 100, 250], dtype=torch.uint8).view(1, 3, 1, 1)
    result = cast_color(image, torch.tensor([[-20, 7, 20]]))
    assert result.flatten().tolist() == [0, 107, 255]


def test_floats_are_shifted_by_255ths_of_the_way_from_black_to_white():
    tones = Tones((-1.0, -2.0), (1.0, 3.0))
    image = torch.tensor([0.0, 2.9]).view(1, 2, 1, 1)
    result = cast_color(image, torch.tensor([[51, 51]]), tones)
    torch.testing.assert_close(result.flatten(), torch.tensor([0.4, 3.0]))


def test_floats_and_bytes_are_the_same_picture():
    image = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    draws = [Draws(torch.arange(4)) for _ in range(2)]
    as_bytes = ColorCasting()(image, draws[0], BYTES)
    as_floats = ColorCasting()(image / 255, draws[1], UNIT)
    torch.testing.assert_close(as_floats * 255, as_bytes.float(), atol=1e-3, rtol=0)


def test_the_papers_count_of_color_casts():
    assert ColorCasting(strength=20).combinations(3, 224) == 41**3 - 1 == 68920


def test_a_channel_stays_with_the_papers_probability():
    """It is off, or on and shifted by 0: 1/2 + 1/2 * 1/41 = 21/41."""
    images = torch.full((20_000, 3, 1, 1), 128, dtype=torch.uint8)
    shifted = ColorCasting(strength=20)(images, Draws(torch.arange(20_000)), BYTES)
    stayed = (shifted == 128).double().mean().item()
    assert stayed == pytest.approx(21 / 41, abs=0.006)
    assert (shifted.min().item(), shifted.max().item()) == (108, 148)


def test_vignetting_is_its_formula():
    image = np.random.default_rng(0).random((7, 11))
    result = vignette(torch.tensor(image)[None, None], torch.tensor([0.3]), torch.tensor([0.5]), UNIT)
    rows, columns = np.mgrid[:7, :11]
    radius = np.hypot(rows - 3, columns - 5) / np.hypot(3, 5)
    share = 1 - 0.5 * np.clip((radius - 0.3) / 0.7, 0, 1) ** 2
    np.testing.assert_allclose(result[0, 0].numpy(), image * share, atol=1e-7)


def test_vignetting_darkens_more_and_more_outwards_and_spares_the_center():
    image = torch.full((1, 1, 9, 9), 200, dtype=torch.uint8)
    row = vignette(image, torch.tensor([0.0]), torch.tensor([0.9]))[0, 0, 4, 4:]
    assert row[0] == 200
    assert (row.int().diff() < 0).all()


def test_the_light_of_normalized_pixels_counts_from_black():
    tones = Tones((-3.0,), (2.0,))
    image = torch.full((1, 1, 3, 3), 1.0)
    result = vignette(image, torch.tensor([0.0]), torch.tensor([1.0]), tones)
    assert result[0, 0, 0, 0] == pytest.approx(-3.0)  # all light of a corner is gone: black
    assert result[0, 0, 1, 1] == 1.0


def test_probability_is_the_share_of_darkened_images():
    images = torch.ones(3000, 1, 3, 3)
    darkened = Vignetting(probability=0.4)(images, Draws(torch.arange(3000)), UNIT)
    share = (darkened[:, 0, 0, 0] < 1).double().mean().item()
    assert share == pytest.approx(0.4, abs=0.03)
