"""Brightness: more light.

    out = x + b;    b = 0.1, 0.2, 0.3, 0.4, 0.5

Departure from ImageNet-C: added to every channel, where they add to the value of HSV; so grey pictures have it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.evaluation.corruption import Corruption

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ADDED = (0.1, 0.2, 0.3, 0.4, 0.5)


class Brightness(Corruption):
    """An overexposed picture."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Adds light; see `Corruption.spoil`."""
        return images + _ADDED[severity - 1]
