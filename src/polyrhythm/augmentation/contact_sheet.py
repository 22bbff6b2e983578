"""A contact sheet: pictures beside what augmentation makes of them.

original | changed | changed | …        a row a picture
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from polyrhythm.augmentation.tones import Tones

TILE = 96
"""Smaller pictures are enlarged, by a whole factor, to at least so many pixels a side."""

_GAP = 4
_PAPER = 255


def contact_sheet(pictures: Tensor, tones: Tones) -> Tensor:
    """Lays pictures out.

    Args:
        pictures: (rows, columns, C, H, W) float, C being 1 or 3.
        tones: what black and white are in them.

    Returns:
        (H', W', 3) uint8.
    """
    rows, columns = pictures.shape[:2]
    tiles = _bytes(pictures.flatten(0, 1), tones)
    factor = -(-TILE // min(tiles.shape[-2:]))
    if factor > 1:
        tiles = interpolate(tiles, scale_factor=factor, mode="nearest")
    tiles = pad(tiles, (_GAP,) * 4, value=_PAPER)
    channels, height, width = tiles.shape[1:]
    sheet = tiles.view(rows, columns, channels, height, width).permute(2, 0, 3, 1, 4)
    return (
        sheet.reshape(channels, rows * height, columns * width)
        .expand(3, -1, -1)
        .permute(1, 2, 0)
        .contiguous()
    )


def _bytes(pictures: Tensor, tones: Tones) -> Tensor:
    black, white = tones.of(pictures)
    return ((pictures - black) * (255 / (white - black))).round_().clamp_(0, 255).to(torch.uint8)
