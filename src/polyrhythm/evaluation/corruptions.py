"""Corruptions: fifteen ways in which images get worse, each at five severities.

D. Hendrycks, T. Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations",
ICLR 2019, arXiv:1903.12261 (ImageNet-C), with its names and severities. For every value x of an image, in [0,
1]:

    brightness        x v' / v, v the largest of its shades,          b = 0.1, 0.2, 0.3, 0.4, 0.5
                      v' = min(1, v + b)
    contrast          m + c (x - m), m the mean of the channel        c = 0.4, 0.3, 0.2, 0.1, 0.05
    defocus_blur      x * (disc of radius r / its area)               r = 3, 4, 6, 8, 10 pixels of 224
    elastic_transform x, each place moved by smooth noise n          std(n) = 1.02, 1.32, 1.73, 2.03, 2.44 pixels of 224
    fog               (x + f p) max(x) / (max(x) + f), p a plasma    f = 1.5, 2, 2.5, 2.5, 3; decay 2, 2, 1.7, 1.5, 1.4
    frost             a x + b ice; see `_ice`          a = 1, 0.8, 0.7, 0.65, 0.6; b = 0.4, 0.6, 0.7, 0.7, 0.75
    gaussian_noise    x + s n, n ~ N(0, 1)                            s = 0.08, 0.12, 0.18, 0.26, 0.38
    glass_blur        blurred by s, shuffled i times by up to d and  s = 0.7, 0.9, 1, 1.1, 1.5, d = 1, 2, 2, 3, 4 pixels
                      blurred again                                  of 224; i = 2, 1, 3, 2, 2
    impulse_noise     0 with probability p/2, 1 with p/2, else x      p = 0.03, 0.06, 0.09, 0.17, 0.27
    jpeg_compression  JPEG(x, quality)                                quality = 25, 18, 15, 10, 7
    motion_blur       mean over half a Gaussian, cut at 2 r, along    s = 3, 5, 8, 12, 15, r = 10, 15, 15, 15, 20 pixels
                      a line at up to 45 degrees                      of 224
    pixelate          nearest(box(x), of s of its sides)              s = 0.6, 0.5, 0.4, 0.3, 0.25
    snow              l x + (1 - l) max(x, 1.5 gray + 1/2) + flakes  l = 0.8, 0.7, 0.7, 0.65, 0.55; see `_snow`
    shot_noise        k / c, k ~ Poisson(c x)                         c = 60, 25, 12, 5, 3 photons for white
    zoom_blur         mean of x, and x magnified 1, 1 + z, …, m times m = 1.1, 1.15, 1.2, 1.25, 1.3;
                                                                      z = 0.01, 0.01, 0.02, 0.02, 0.03

Departures from ImageNet-C: lengths are fractions of the shorter side, so that small images suffer as large ones
do. The disc of the defocus has a rim that is soft by one pixel and no further smoothing. Glass blur reads every
place near itself instead of swapping neighbors one after the other, which no batch can do. Frost is drawn instead
of cut from five photographs. Elastic transform has the constants of C. Michaelis et al., "Benchmarking robustness
in object detection", arXiv:1907.07484, for images of 224 pixels, and no affine transform before.
`benchmarks/corruptions` holds all fifteen next to their package, `imagecorruptions`.

The plasma of the fog is made by midpoint displacement (A. Fournier, D. Fussell, L. Carpenter, "Computer
rendering of stochastic models", Communications of the ACM 25, 1982): places between known ones get their mean
plus a random number; its range falls by the square of the decay from each scale to the next smaller one.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from math import ceil, cos, pi, sin
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, interpolate, pad

from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from polyrhythm.augmentation.tones import Tones

SEVERITIES = 5
REFERENCE_SIDE = 224
"""Side of the images, in pixels, for which lengths were chosen."""
_MODES = {1: "L", 3: "RGB"}
_POINTS_OF_A_LINE = 64
_SHADES = 3

Generators = list[torch.Generator]


def corrupt(name: str, images: Tensor, severity: int, indices: Tensor, tones: Tones) -> Tensor:
    """Return corrupted images, (B, C, H, W) with the dtype of `images`.

    Args:
        name: a key of `CORRUPTIONS`.
        images: (B, C, H, W) float; not changed.
        severity: 1 to 5.
        indices: (B,) int64, numbers of the images. An image's noise is a function of its number, not of its batch.
        tones: values of black and white in `images`.

    Raises:
        RequestError: this corruption does not support this number of channels.
    """
    black, white = tones.of(images)
    generators = [
        torch.Generator().manual_seed(seed_for(name, severity, index)) for index in indices.tolist()
    ]
    unit = ((images - black) / (white - black)).float()
    corrupted = CORRUPTIONS[name](unit, severity - 1, generators).clamp(0, 1)
    return (corrupted * (white - black) + black).to(images.dtype)


def _brightness(images: Tensor, level: int, generators: Generators) -> Tensor:
    value = images.amax(1, keepdim=True)  # V of HSV
    brighter = (value + (0.1, 0.2, 0.3, 0.4, 0.5)[level]).clamp_max(1)
    return torch.where(value > 0, images * brighter / value.clamp_min(1e-12), brighter)


def _contrast(images: Tensor, level: int, generators: Generators) -> Tensor:
    mean = images.mean((2, 3), keepdim=True)
    return mean + (0.4, 0.3, 0.2, 0.1, 0.05)[level] * (images - mean)


def _defocus_blur(images: Tensor, level: int, generators: Generators) -> Tensor:
    return _blurred(images, _disc(_pixels((3.0, 4.0, 6.0, 8.0, 10.0)[level], images)))


def _elastic_transform(images: Tensor, level: int, generators: Generators) -> Tensor:
    kernel = _gaussian(_pixels(2.24, images))
    noise = torch.stack([torch.randn(2, *images.shape[2:], generator=each) for each in generators])
    smooth = _blurred(noise, kernel) / kernel.square().sum().sqrt()  # a standard deviation of 1 again
    return _moved(images, smooth * _pixels((1.02, 1.32, 1.73, 2.03, 2.44)[level], images))


def _fog(images: Tensor, level: int, generators: Generators) -> Tensor:
    height, width = images.shape[2:]
    strength, decay = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[level]
    side = 1 << max(1, (max(height, width) - 1).bit_length())
    plasmas = torch.stack([_plasma(side, decay, each)[:height, :width] for each in generators])
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + strength * plasmas[:, None]) * brightest / (brightest + strength)


def _frost(images: Tensor, level: int, generators: Generators) -> Tensor:
    kept, laid = ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[level]
    ice = torch.stack([_ice(images, each) for each in generators])
    return kept * images + laid * ice


def _gaussian_noise(images: Tensor, level: int, generators: Generators) -> Tensor:
    noise = torch.stack([torch.randn(images.shape[1:], generator=each) for each in generators])
    return images + (0.08, 0.12, 0.18, 0.26, 0.38)[level] * noise


def _glass_blur(images: Tensor, level: int, generators: Generators) -> Tensor:
    deviation, reach, times = ((0.7, 1.0, 2), (0.9, 2.0, 1), (1.0, 2.0, 3), (1.1, 3.0, 2), (1.5, 4.0, 2))[
        level
    ]
    soft = _gaussian(_pixels(deviation, images))
    seen = _blurred(images, soft)
    for _ in range(times):
        aside = torch.stack([torch.rand(2, *images.shape[2:], generator=each) for each in generators])
        seen = _moved(seen, (2 * aside - 1) * _pixels(reach, images))
    return _blurred(seen, soft)


def _impulse_noise(images: Tensor, level: int, generators: Generators) -> Tensor:
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[level]
    chance = torch.stack([torch.rand(images.shape[1:], generator=each) for each in generators])
    salted = torch.where(chance < share, 1.0, images)
    return torch.where(chance < share / 2, 0.0, salted)


def _jpeg_compression(images: Tensor, level: int, generators: Generators) -> Tensor:
    if images.shape[1] not in _MODES:
        raise RequestError(f"images of {images.shape[1]} channels cannot be saved as JPEG: 1 or 3 can")
    return torch.stack([_saved_as_jpeg(image, (25, 18, 15, 10, 7)[level]) for image in images])


def _motion_blur(images: Tensor, level: int, generators: Generators) -> Tensor:
    radius, deviation = ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0))[level]
    angles = [(float(torch.rand((), generator=each)) - 0.5) * pi / 2 for each in generators]
    moved = [
        _streaked(image[None], radius, deviation, angle) for image, angle in zip(images, angles, strict=True)
    ]
    return torch.cat(moved)


def _pixelate(images: Tensor, level: int, generators: Generators) -> Tensor:
    size = images.shape[2:]
    rows, columns = (
        _boxes(side, max(1, int(side * (0.6, 0.5, 0.4, 0.3, 0.25)[level]))).to(images.dtype) for side in size
    )
    return interpolate(rows @ images @ columns.T, size, mode="nearest-exact")


def _shot_noise(images: Tensor, level: int, generators: Generators) -> Tensor:
    photons = (60.0, 25.0, 12.0, 5.0, 3.0)[level]
    light = images.clamp(0, 1) * photons
    counted = [torch.poisson(each, generator=own) for each, own in zip(light, generators, strict=True)]
    return torch.stack(counted) / photons


def _snow(images: Tensor, level: int, generators: Generators) -> Tensor:
    """Let flakes fall: normal noise, magnified; the part above a threshold is drawn out along a line."""
    mean, spread, magnified, threshold, radius, deviation, light = (
        (0.1, 0.3, 3.0, 0.5, 10, 4.0, 0.8),
        (0.2, 0.3, 2.0, 0.5, 12, 4.0, 0.7),
        (0.55, 0.3, 4.0, 0.9, 12, 8.0, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8.0, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12.0, 0.55),
    )[level]
    layers = []
    for each in generators:
        noise = mean + spread * torch.randn(1, 1, *images.shape[2:], generator=each)
        flakes = _magnified(noise, magnified)
        flakes = torch.where(flakes < threshold, 0.0, flakes).clamp(0, 1)
        angle = -(pi / 4 + float(torch.rand((), generator=each)) * pi / 2)
        layers.append(_streaked(flakes, radius, deviation, angle))
    snow = torch.cat(layers)
    paler = torch.maximum(images, images.mean(1, keepdim=True) * 1.5 + 0.5)
    return light * images + (1 - light) * paler + snow + snow.flip((2, 3))


def _zoom_blur(images: Tensor, level: int, generators: Generators) -> Tensor:
    most, step = ((1.1, 0.01), (1.15, 0.01), (1.2, 0.02), (1.25, 0.02), (1.3, 0.03))[level]
    factors = [1 + number * step for number in range(int((most - 1) / step + 1e-6) + 1)]
    total = images.clone()
    for factor in factors:
        total += _magnified(images, factor)
    return total / (len(factors) + 1)


CORRUPTIONS: dict[str, Callable[[Tensor, int, Generators], Tensor]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "defocus_blur": _defocus_blur,
    "elastic_transform": _elastic_transform,
    "fog": _fog,
    "frost": _frost,
    "gaussian_noise": _gaussian_noise,
    "glass_blur": _glass_blur,
    "impulse_noise": _impulse_noise,
    "jpeg_compression": _jpeg_compression,
    "motion_blur": _motion_blur,
    "pixelate": _pixelate,
    "shot_noise": _shot_noise,
    "snow": _snow,
    "zoom_blur": _zoom_blur,
}
"""Each maps images (B, C, H, W) float32 in [0, 1], a level 0 to 4 and a generator per image to new images."""


def _pixels(length: float, images: Tensor) -> float:
    """Scale a length that was chosen for 224 pixels to the size of these images."""
    return length * min(images.shape[2:]) / REFERENCE_SIDE


def _blurred(images: Tensor, kernel: Tensor) -> Tensor:
    """Convolve images (B, C, H, W) with a kernel (k, k) of odd k; edge pixels are repeated outwards."""
    channels, half = images.shape[1], kernel.shape[0] // 2
    weight = kernel.to(images.dtype).expand(channels, 1, *kernel.shape)
    return conv2d(pad(images, (half,) * 4, mode="replicate"), weight, groups=channels)


def _streaked(images: Tensor, radius: int, deviation: float, angle: float) -> Tensor:
    """Return images (B, C, H, W) as a camera sees them that moves: at this angle, and for less time the farther.

    Args:
        images: edge pixels are repeated outwards.
        radius: half the way, in pixels of 224.
        deviation: deviation of the Gaussian by which times fall, in pixels of 224.
        angle: angle in radians, toward the lower edge.
    """
    scale = _pixels(1.0, images)
    points = torch.linspace(0, 2 * radius, ceil(2 * radius * max(1.0, scale)) + 1)
    times = (-0.5 * (points / deviation).square()).exp()
    down, right = ((points * scale * part - 0.5).ceil().int().tolist() for part in (sin(angle), cos(angle)))
    half, (height, width) = ceil(2 * radius * scale), images.shape[2:]
    wide, total = pad(images, (half,) * 4, mode="replicate"), torch.zeros_like(images)
    for y, x, time in zip(down, right, (times / times.sum()).tolist(), strict=True):
        total += time * wide[:, :, half + y : half + y + height, half + x : half + x + width]
    return total


def _boxes(side: int, small: int) -> Tensor:
    """Return a matrix (small, side) that shrinks a side of pixels: each new one is the mean of whole old ones."""
    middles = (torch.arange(small, dtype=torch.float64) + 0.5) * (side / small)
    places = torch.arange(side) + 0.5 - middles[:, None]
    within = (places > -0.5 * side / small) & (places <= 0.5 * side / small)
    return (within / within.sum(1, keepdim=True)).float()


def _magnified(images: Tensor, factor: float) -> Tensor:
    """Return the middle of images (B, C, H, W), magnified to their size (bilinear)."""
    scale = torch.tensor([[1 / factor, 0, 0], [0, 1 / factor, 0]], dtype=images.dtype)
    grid = affine_grid(scale.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _moved(images: Tensor, places: Tensor) -> Tensor:
    """Return images (B, C, H, W) sampled at `places` (B, 2, H, W): pixels to the right and down (bilinear)."""
    height, width = images.shape[2:]
    still = affine_grid(torch.eye(2, 3).expand(len(images), 2, 3), list(images.shape), align_corners=False)
    shifts = torch.stack([places[:, 0] * (2 / width), places[:, 1] * (2 / height)], dim=3)
    return grid_sample(
        images, still + shifts, mode="bilinear", padding_mode="reflection", align_corners=False
    )


def _ice(images: Tensor, generator: torch.Generator) -> Tensor:
    """Draw frost on a pane for one of the images, (C, H, W), mostly from 0 to 1: needles on a cloudy ground.

    Needles are sparse points drawn out along eight random directions; the brightest counts. Brightness,
    contrast and blue tint lie within those of the photographs that ImageNet-C takes.
    """
    channels, height, width = images.shape[1:]
    brightness, contrast = 0.45 + 0.4 * torch.rand(2, generator=generator)
    ground = _plasma(1 << max(1, (max(height, width) - 1).bit_length()), 1.7, generator)[:height, :width]
    length, needles = _pixels(24.0, images), torch.zeros(height, width)
    for _ in range(8):
        angle = float(torch.rand((), generator=generator)) * pi
        points = torch.rand(1, 1, height, width, generator=generator)
        drawn = _blurred((points > 0.985).float(), _line(length, angle))[0, 0]
        needles = torch.maximum(needles, drawn)
    needles = _blurred(needles[None, None], _gaussian(_pixels(1.0, images)))[0, 0]
    needles = (needles - needles.mean()) / needles.std().clamp_min(1e-6)
    gray: Tensor = brightness + 0.2 * (ground - 0.5) + 0.15 * contrast * needles
    tint = torch.tensor([0.87, 1.02, 1.11]) if channels == _SHADES else torch.ones(channels)
    return gray * tint[:, None, None]


def _plasma(side: int, decay: float, generator: torch.Generator) -> Tensor:
    """Return a random cloud (side, side) from 0 to 1, which continues at the opposite edges; `side` a power of 2."""
    cloud, step, spread = torch.zeros(side, side), side, 100.0

    def displaced(total: Tensor) -> Tensor:
        return total / 4 + spread * spread * (2 * torch.rand(total.shape, generator=generator) - 1)

    while step >= 2:
        half = step // 2
        corners = cloud[::step, ::step]
        pairs = corners + corners.roll(-1, 0)
        cloud[half::step, half::step] = displaced(pairs + pairs.roll(-1, 1))
        middles = cloud[half::step, half::step]
        cloud[::step, half::step] = displaced(middles + middles.roll(1, 0) + corners + corners.roll(-1, 1))
        cloud[half::step, ::step] = displaced(middles + middles.roll(1, 1) + corners + corners.roll(-1, 0))
        step, spread = half, spread / decay
    cloud -= cloud.min()
    return cloud / cloud.max().clamp_min(1e-12)


def _disc(radius: float) -> Tensor:
    half = ceil(radius)
    offsets = torch.arange(-half, half + 1).float()
    distance = (offsets[:, None].square() + offsets[None].square()).sqrt()
    disc = (radius + 0.5 - distance).clamp(0, 1)
    return disc / disc.sum()


def _gaussian(deviation: float) -> Tensor:
    """Return a kernel (k, k) of sum 1, cut at three standard deviations."""
    half = max(1, ceil(3 * deviation))
    offsets = torch.arange(-half, half + 1) / max(deviation, 1e-3)
    weights: Tensor = (-0.5 * offsets.square()).exp()
    kernel = weights[:, None] * weights[None]
    return kernel / kernel.sum()


def _line(length: float, angle: float) -> Tensor:
    """Return a kernel (k, k) with a line through its center; each point is shared by the four pixels around it."""
    half = int(length / 2) + 1
    kernel = torch.zeros(2 * half + 1, 2 * half + 1)
    along = torch.linspace(-length / 2, length / 2, _POINTS_OF_A_LINE)
    x, y = half + along * cos(angle), half + along * sin(angle)
    left, top = (each.floor().long().clamp_max(2 * half - 1) for each in (x, y))
    right_share, lower_share = x - left, y - top
    for row, share_y in ((top, 1 - lower_share), (top + 1, lower_share)):
        kernel.index_put_((row, left), share_y * (1 - right_share), accumulate=True)
        kernel.index_put_((row, left + 1), share_y * right_share, accumulate=True)
    return kernel / kernel.sum()


def _saved_as_jpeg(image: Tensor, quality: int) -> Tensor:
    content = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = BytesIO()
    channels = content.shape[2]
    Image.fromarray(content.squeeze(2) if channels == 1 else content).save(file, "JPEG", quality=quality)
    opened = np.asarray(Image.open(file)).reshape(content.shape)
    return torch.from_numpy(opened.copy()).permute(2, 0, 1).float() / 255
