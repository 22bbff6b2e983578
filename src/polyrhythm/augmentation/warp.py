"""Warps: augmentations that move pixels. Each maps a pixel of the new image to its source in the old one.

    out[b, :, p] = image[b, :, map_1(map_2(… p))]       the last warp's map is applied first

A point is a complex number, x + iy in pixels from the center. Consecutive warps are composed into one map and the
image is sampled once, which is faster than sampling after each and blurs only once; linear maps are multiplied as
matrices before any points exist. Mirroring takes part, and alone it moves whole pixels. A sample that does not move is
not sampled at all, so strength 0 leaves its bits unchanged.

Where the image is a window of a larger one, the larger one is sampled, so that what lies around the window fills its
corners:

    out[b, :, p] = larger[b, :, map_1(map_2(… p)) + center of the window]        unless fill=frame

With `fill=frame` the window alone is moved, as Deep Image's is (arXiv:1501.02876, section 4.1: "all the augmentations
are performed on the cropped image").
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import grid_sample

from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import Tones
from polyrhythm.specs import Config

Fill = Literal["zero", "reflect", "border", "frame"]
_PADDING = {"zero": "zeros", "reflect": "reflection", "border": "border", "frame": "zeros"}
Larger = tuple[Tensor, Tensor]
"""Images that windows were cut out of, (B, C, H, W), and the windows' first rows and columns, (B, 2) int64."""


class Movement(Config):
    """An augmentation that moves pixels: implements `matrix`, or `source` if the map is not linear."""

    @abstractmethod
    def drawn(self, draws: Draws) -> Tensor:
        """Draw the movement of each sample; (B, k) float, all zeros where it does not move."""

    def matrix(self, parameters: Tensor) -> Tensor | None:
        """Return the map as matrices on (x, y), (B, 2, 2), for parameters (B, k); None if it is not linear."""
        return None

    def source(self, points: Tensor, parameters: Tensor) -> Tensor:
        """Map points of the new image to the points of the old one that they show.

        Args:
            points: (B, H, W) complex, x to the right and iy down, in pixels from the center; not changed.
            parameters: (B, k) float, as drawn.

        Returns:
            (B, H, W) complex.
        """
        matrix = self.matrix(parameters)
        assert matrix is not None, "a movement has a matrix, or a map of its own"
        return _mapped(points.real, points.imag, matrix)

    def mirrored(self, parameters: Tensor) -> Tensor | None:
        """Return which axes, x and y, are only mirrored, (B, 2) bool; None if pixels must be interpolated."""
        return None


class Warp(Movement):
    """An augmentation that interpolates between pixels.

    Attributes:
        probability: probability that a sample is moved.
        fill: pixels from outside: `zero` (the mean color, as images are normalized), `reflect` (the image mirrored),
            `border` (its outermost pixels), or `frame` (the mean color also where a larger image has pixels around a
            window).
    """

    probability: float = Field(default=1.0, ge=0, le=1)
    fill: Fill = "zero"

    @abstractmethod
    def draw(self, draws: Draws) -> Tensor:
        """Draw the parameters of every sample, (B, k) float; all zeros leave a sample unchanged."""

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        return warp(images, [(self, self.drawn(draws))], self.fill)

    def drawn(self, draws: Draws) -> Tensor:
        moved = draws.chance(self.probability)
        return torch.where(moved[:, None], self.draw(draws), 0.0)


Steps = Sequence[tuple[Movement, Tensor]]
"""Movements in order, each with its parameters (B, k)."""


def warp(images: Tensor, steps: Steps, fill: Fill = "zero", larger: Larger | None = None) -> Tensor:
    """Apply several movements with one bilinear sampling; images that are only mirrored are not sampled.

    Args:
        images: (B, C, H, W), uint8 or float; not changed.
        steps: the movements in order, each with its parameters (B, k).
        fill: value of pixels outside an image.
        larger: larger images that contain the given ones, for pixels at their edges; None: there are none.

    Returns:
        (B, C, H, W) with the dtype and device of `images`; bytes are rounded.
    """
    moved, flips = _moved_and_mirrored(len(images), steps)
    if fill == "frame":
        larger = None
    if bool(moved.all()):
        return _sampled(images, steps, fill, larger)
    for axis, dimension in enumerate((-1, -2)):
        images = mirror(images, flips[:, axis] & ~moved, dimension)
    where = moved.nonzero().squeeze(1)
    if len(where) == 0:
        return images
    chosen = [(kind, parameters[where]) for kind, parameters in steps]
    around = None if larger is None else (larger[0][where.to(images.device)], larger[1][where])
    where = where.to(images.device)
    return images.index_copy(0, where, _sampled(images.index_select(0, where), chosen, fill, around))


def mirror(images: Tensor, chosen: Tensor, dimension: int) -> Tensor:
    """Mirror those of the images (B, C, H, W) where `chosen` (B,) bool is true along a dimension, in a new tensor."""
    where = chosen.nonzero().squeeze(1).to(images.device)
    if len(where) == 0:
        return images
    return images.index_copy(0, where, images.index_select(0, where).flip(dimension))


def distances(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the distance of every pixel from the center in half diagonals, (H, W): 1 in the corners."""
    x, y = _from_center(width, dtype, device), _from_center(height, dtype, device)
    return (x.square() + y.square()[:, None]).sqrt_() / half_diagonal(height, width)


def half_diagonal(height: int, width: int) -> float:
    """Return the distance of a corner from the center, in pixels."""
    return float(max(((height - 1) ** 2 + (width - 1) ** 2) ** 0.5 / 2, 1.0))


def _moved_and_mirrored(samples: int, steps: Steps) -> tuple[Tensor, Tensor]:
    """Return which samples must be sampled, (B,), and along which axes the others are mirrored, (B, 2)."""
    moved, flips = torch.zeros(samples, dtype=torch.bool), torch.zeros(samples, 2, dtype=torch.bool)
    for kind, parameters in steps:
        axes = kind.mirrored(parameters)
        if axes is None:
            moved |= (parameters != 0).any(1)
        else:
            flips ^= axes
    return moved, flips


def _sampled(images: Tensor, steps: Steps, fill: Fill, larger: Larger | None) -> Tensor:
    real = torch.float64 if images.dtype == torch.float64 else torch.float32
    there = [(kind, parameters.to(images.device, real)) for kind, parameters in steps]
    grid = torch.view_as_real(_source_points(images, there, real))
    source = images
    if larger is not None:
        source, places = larger
        ends = [[length - 1 for length in reversed(each.shape[2:])] for each in (images, source)]
        inner, outer = (torch.tensor(each, dtype=real, device=images.device).clamp_min(1) for each in ends)
        first = places.flip(1).to(images.device, real)
        # from -1 to 1 across the window, to pixels of the larger image, to -1 to 1 across that
        grid = (grid + 1) * (inner / outer) + (2 * first / outer - 1)[:, None, None]
    sampled = grid_sample(
        source.to(real),
        grid,
        mode="bilinear",
        padding_mode=_PADDING[fill],
        align_corners=True,
    )
    if not images.is_floating_point():
        sampled = sampled.round_()  # values outside the range of bytes are rounding errors
    return sampled.to(images.dtype)


def _source_points(images: Tensor, steps: Steps, dtype: torch.dtype) -> Tensor:
    """Return the source of every pixel, (B, H, W) complex, from -1 - i (first row and column) to 1 + i (the last)."""
    height, width = images.shape[2:]
    x, y = _from_center(width, dtype, images.device), _from_center(height, dtype, images.device)[:, None]
    unmoved = torch.eye(2, dtype=dtype, device=images.device).expand(len(images), 2, 2)
    matrix = unmoved
    for kind, parameters in reversed(steps):
        linear = kind.matrix(parameters)
        if linear is not None:
            matrix = linear @ matrix
            continue
        points = kind.source(_mapped(x, y, matrix), parameters)
        x, y, matrix = points.real, points.imag, unmoved
    half = matrix.new_tensor([max(width - 1, 1) / 2, max(height - 1, 1) / 2])
    return _mapped(x, y, matrix / half[:, None])


def _mapped(x: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
    """Apply matrices (B, 2, 2) to the points x + iy; x and y broadcast to (B, H, W)."""
    columns = torch.complex(matrix[:, 0], matrix[:, 1])[:, :, None, None]
    return columns[:, 0] * x + columns[:, 1] * y


def _from_center(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(length, dtype=dtype, device=device) - (length - 1) / 2
