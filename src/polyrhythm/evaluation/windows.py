"""Dense evaluation by brute force: windows of the training size are cut out of a larger picture, one after another."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

_SHARE = 7
"""A window moves by a seventh of its side: 32 of 224 pixels, the stride of most networks."""


class SlidingWindows:
    """A network that looks at every window of a picture; windows at the far edges are always among them.

    Args:
        scorer: maps pictures of the training size (B, C, h, w) to logits (B, classes).
        size: (h, w).
        stride: pixels between windows; 0: a seventh of the shorter side.
    """

    def __init__(self, scorer: Callable[[Tensor], Tensor], size: tuple[int, ...], stride: int = 0) -> None:
        self._scorer = scorer
        self._height, self._width = size
        self._stride = stride or max(1, min(size) // _SHARE)

    def __call__(self, images: Tensor) -> Tensor:
        """Gives the class scores (B, classes) of images (B, C, H, W), averaged over all windows."""
        height, width = images.shape[2:]
        places = list(product(self._starts(height, self._height), self._starts(width, self._width)))
        scores = [
            self._scorer(images[:, :, top : top + self._height, left : left + self._width])
            for top, left in places
        ]
        return torch.stack(scores).mean(0)

    def _starts(self, length: int, window: int) -> list[int]:
        last = length - window
        starts = list(range(0, last + 1, self._stride))
        return starts if starts[-1] == last else [*starts, last]
