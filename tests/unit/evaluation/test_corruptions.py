"""Corruptions, held to formulas, numpy and Pillow."""

from __future__ import annotations

from collections.abc import Callable
from colorsys import hsv_to_rgb, rgb_to_hsv
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.augmentation.tones import UNIT, Tones
from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.corruptions import CORRUPTIONS, corrupt

EVERY = sorted(CORRUPTIONS)


def _corruption(name: str) -> Callable[[torch.Tensor, int, torch.Tensor, Tones], torch.Tensor]:
    return partial(corrupt, name)


def _pictures(images: int = 3, channels: int = 3, side: int = 32) -> torch.Tensor:
    smooth = torch.rand(images, channels, 4, 4, generator=torch.Generator().manual_seed(1)) * 0.6 + 0.2
    return torch.nn.functional.interpolate(smooth, (side, side), mode="bicubic").clamp(0, 1)


@pytest.mark.parametrize("name", EVERY)
def test_each_picture_suffers_alone_the_same_and_more_at_every_severity(name: str) -> None:
    pictures, corruption, indices = _pictures(side=80), _corruption(name), torch.tensor([7, 3, 9])
    before, distances = pictures.clone(), []
    for severity in range(1, 6):
        together = corruption(pictures, severity, indices, UNIT)
        alone = corruption(pictures[1:2], severity, indices[1:2], UNIT)
        torch.testing.assert_close(alone, together[1:2])
        assert together.shape == pictures.shape
        assert 0 <= together.min() <= together.max() <= 1
        distances.append(float((together - pictures).square().mean()))
    assert torch.equal(pictures, before)
    assert 0 < distances[0] < distances[2] < distances[4]


@pytest.mark.parametrize("name", EVERY)
def test_the_tones_change_nothing_but_the_numbers(name: str) -> None:
    pictures, indices = _pictures(channels=1), torch.arange(3)
    tones = Tones((-2.0,), (3.0,))
    expected = _corruption(name)(pictures, 3, indices, UNIT) * 5 - 2
    torch.testing.assert_close(
        _corruption(name)(pictures * 5 - 2, 3, indices, tones), expected, rtol=0, atol=0.03
    )


def test_noise_has_the_stated_size() -> None:
    gray, indices = torch.full((8, 3, 64, 64), 0.5), torch.arange(8)
    assert (_corruption("gaussian_noise")(gray, 1, indices, UNIT) - gray).std() == pytest.approx(
        0.08, rel=0.02
    )
    counted = _corruption("shot_noise")(gray, 2, indices, UNIT)
    assert counted.mean() == pytest.approx(0.5, abs=0.01)
    assert counted.std() == pytest.approx((0.5 / 25) ** 0.5, rel=0.03)
    torch.testing.assert_close((counted * 25).round(), counted * 25)
    spoiled = _corruption("impulse_noise")(gray, 4, indices, UNIT)
    assert (spoiled == 0).float().mean() == pytest.approx(0.085, abs=0.005)
    assert (spoiled == 1).float().mean() == pytest.approx(0.085, abs=0.005)


def test_light_and_contrast_are_the_formulas() -> None:
    pictures, indices = _pictures(), torch.arange(3)
    pictures[0, :, 0, 0] = 0  # black becomes gray
    brighter = _corruption("brightness")(pictures, 3, indices, UNIT).permute(0, 2, 3, 1).reshape(-1, 3)
    pixels = pictures.permute(0, 2, 3, 1).reshape(-1, 3)
    for found, before in zip(brighter[::97].tolist(), pixels[::97].tolist(), strict=True):
        hue, saturation, value = rgb_to_hsv(*before)
        assert found == pytest.approx(hsv_to_rgb(hue, saturation, min(1, value + 0.3)), abs=1e-6)
    gray = pictures[:, :1]
    torch.testing.assert_close(_corruption("brightness")(gray, 3, indices, UNIT), (gray + 0.3).clamp(0, 1))
    mean = pictures.mean((2, 3), keepdim=True)
    torch.testing.assert_close(
        _corruption("contrast")(pictures, 2, indices, UNIT), mean + 0.3 * (pictures - mean)
    )


def test_defocus_keeps_the_light_and_spreads_a_point() -> None:
    point = torch.zeros(1, 1, 65, 65)
    point[0, 0, 32, 32] = 1
    defocus = _corruption("defocus_blur")
    spread = defocus(point, 5, torch.tensor([2]), UNIT)
    assert spread.sum() == pytest.approx(1, rel=1e-5)
    assert torch.equal(spread, spread.flip(2))
    torch.testing.assert_close(spread, spread.transpose(2, 3))
    assert int((spread > 0).sum()) == pytest.approx(np.pi * (10 * 65 / 224 + 0.5) ** 2, rel=0.1)
    flat = torch.full((1, 1, 30, 30), 0.3)
    torch.testing.assert_close(defocus(flat, 5, torch.tensor([0]), UNIT), flat)


@pytest.mark.parametrize(("severity", "radius", "deviation"), [(1, 10, 3), (5, 20, 15)])
def test_motion_is_a_sum_of_shifted_pictures_that_fades_as_a_gaussian(
    severity: int, radius: int, deviation: float
) -> None:
    picture = _pictures(images=1, channels=1, side=224)
    found = _corruption("motion_blur")(picture, severity, torch.tensor([4]), UNIT)[0, 0].numpy()
    drawn = torch.rand((), generator=torch.Generator().manual_seed(seed_for("motion_blur", severity, 4)))
    angle = np.deg2rad(90 * float(drawn) - 45)
    times = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * deviation**2))
    places, expected = np.arange(224), np.zeros((224, 224))
    for way, time in enumerate(times / times.sum()):
        y, x = (int(np.ceil(way * part - 0.5)) for part in (np.sin(angle), np.cos(angle)))
        rows, columns = (np.clip(places + each, 0, 223) for each in (y, x))
        expected += time * picture[0, 0].numpy()[rows][:, columns]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_motion_is_as_long_in_small_pictures_as_in_large_ones() -> None:
    point = torch.zeros(1, 1, 65, 65)
    point[0, 0, 32, 32] = 1
    spread = _corruption("motion_blur")(point, 5, torch.tensor([2]), UNIT)[0, 0]
    assert spread.sum() == pytest.approx(1, rel=1e-5)
    places = torch.arange(65.0) - 32
    center = (float((spread * places).sum()), float((spread * places[:, None]).sum()))
    ways = np.arange(41)
    times = np.exp(-(ways**2) / (2 * 15**2))
    assert np.hypot(*center) == pytest.approx((ways * times).sum() / times.sum() * 65 / 224, rel=0.1)


def test_pixelation_is_an_average_over_squares() -> None:
    pictures = _pictures(side=32)
    found = _corruption("pixelate")(pictures, 2, torch.arange(3), UNIT)
    squares = pictures.view(3, 3, 16, 2, 16, 2).mean((3, 5))
    torch.testing.assert_close(found, squares.repeat_interleave(2, 2).repeat_interleave(2, 3))


@pytest.mark.parametrize(("severity", "share"), [(1, 0.6), (3, 0.4), (4, 0.3)])
def test_pixelation_is_pillows_where_sides_do_not_divide(severity: int, share: float) -> None:
    picture = torch.rand(1, 1, 46, 86, generator=torch.Generator().manual_seed(5))
    found = _corruption("pixelate")(picture, severity, torch.tensor([0]), UNIT)[0, 0].numpy()
    size = int(86 * share), int(46 * share)
    small = Image.fromarray(picture[0, 0].numpy()).resize(size, Image.Resampling.BOX)
    expected = np.asarray(small.resize((86, 46), Image.Resampling.NEAREST))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_compression_is_pillows() -> None:
    picture = _pictures(images=1)
    content = (picture[0] * 255).round().byte().permute(1, 2, 0).numpy()
    file = BytesIO()
    Image.fromarray(content).save(file, "JPEG", quality=15)
    expected = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)[None] / 255
    torch.testing.assert_close(_corruption("jpeg_compression")(picture, 3, torch.tensor([0]), UNIT), expected)
    with pytest.raises(RequestError, match="images of 2 channels"):
        _corruption("jpeg_compression")(picture[:, :2], 1, torch.tensor([0]), UNIT)


def test_fog_is_a_cloud_that_the_brightest_place_bears() -> None:
    gray, indices = torch.full((6, 3, 48, 60), 0.5), torch.arange(6)
    found = _corruption("fog")(gray, 1, indices, UNIT)
    # x + f p, scaled by max(x) / (max(x) + f): from a quarter of the gray to all of it, as p goes from 0 to 1.
    cloud = (found / (0.5 / (0.5 + 1.5)) - 0.5) / 1.5
    assert cloud.min() >= -1e-5
    assert cloud.max() <= 1 + 1e-5
    assert torch.equal(found[:, 0], found[:, 2])  # fog has no color
    near = (cloud[..., 1:] - cloud[..., :-1]).square().mean()
    far = (cloud[..., 24:] - cloud[..., :-24]).square().mean()
    assert far > 20 * near  # large shapes
    apart = (cloud[0] - cloud[1]).abs().mean()
    assert apart > 0.05  # each picture has its own


def test_snow_brightens_flat_pictures_by_flakes_and_their_mirror() -> None:
    dark, indices = torch.zeros(5, 1, 64, 64), torch.arange(5)
    found = _corruption("snow")(dark, 2, indices, UNIT)
    pale = 0.3 * 0.5  # (1 - l) max(0, 1.5 gray + 1/2)
    assert found.min() >= pale - 1e-6
    flakes = found - pale
    torch.testing.assert_close(flakes, flakes.flip((2, 3)), atol=1e-5, rtol=0)
    share = float((flakes > 0.05).float().mean())
    assert 0.05 < share < 0.9


def test_elastic_transform_moves_places_by_smooth_noise_of_the_stated_size() -> None:
    # On a ramp, a picture's change is how far its places were moved.
    places = torch.arange(224.0).expand(4, 1, 224, 224) / 223
    for severity, pixels in ((1, 1.02), (5, 2.44)):
        found = _corruption("elastic_transform")(places, severity, torch.arange(4), UNIT)
        moved = ((found - places) * 223)[..., 16:-16, 16:-16]
        assert moved.std() == pytest.approx(pixels, rel=0.05)
        assert abs(float(moved.mean())) < 0.1
        step = (moved[..., 1:] - moved[..., :-1]).square().mean()
        # Of noise that a Gaussian of deviation s smoothed, neighbors correlate by exp(-1 / 4 s^2).
        assert step == pytest.approx(2 * pixels**2 * (1 - np.exp(-1 / (4 * 2.24**2))), rel=0.1)


def test_glass_blur_shuffles_near_places_and_keeps_the_light() -> None:
    ramp = (torch.arange(224.0) - 111.5).expand(2, 3, 224, 224) / 223 + 0.5
    found = _corruption("glass_blur")(ramp, 3, torch.arange(2), UNIT)
    moved = ((found - ramp) * 223)[..., 20:-20, 20:-20]
    assert abs(float(moved.mean())) < 0.01
    assert 0 < moved.abs().max() < 6  # three times by at most two pixels
    # Three shuffles of deviation 2/sqrt(3) each, the means of the last one's blur: 1 / (2 s sqrt(pi)) of it is left.
    assert moved.std() == pytest.approx((3 * 4 / 3) ** 0.5 / (2 * np.pi**0.5), rel=0.25)
    assert torch.equal(found[:, 0], found[:, 2])  # channels stay together


def test_frost_is_laid_over_what_is_kept() -> None:
    ramp, indices = torch.linspace(0, 0.3, 64).expand(6, 3, 64, 64), torch.arange(6)
    kept, pane = (_corruption("frost")(each, 3, indices, UNIT) for each in (ramp, torch.zeros_like(ramp)))
    inside = (kept < 1) & (pane > 0)
    torch.testing.assert_close((kept - pane)[inside], 0.7 * ramp[inside])
    ice = pane / 0.7
    assert ice[:, 0].mean() < ice[:, 1].mean() < ice[:, 2].mean()  # bluish
    brightness = ice.mean((1, 2, 3))
    assert 0.35 < brightness.min() < brightness.max() < 1
    assert brightness.std() > 0.02
    assert ice[:, 1].std((1, 2)).min() > 0.02
    gray = _corruption("frost")(ramp[:, :1], 3, indices, UNIT)
    assert gray.shape == (6, 1, 64, 64)


def test_zoom_blur_is_the_mean_of_magnified_pictures() -> None:
    # Magnified f times, the slope of a plane through the center becomes 1/f of it.
    places = (torch.arange(41.0) - 20).expand(1, 1, 41, 41)
    found = _corruption("zoom_blur")((places + 20) / 40, 1, torch.tensor([0]), UNIT)
    slope = (1 + sum(1 / (1 + number / 100) for number in range(11))) / 12
    torch.testing.assert_close(found * 40 - 20, places * slope, atol=1e-3, rtol=0)
