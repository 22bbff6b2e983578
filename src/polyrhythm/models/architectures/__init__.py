"""The project's own networks, one per module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


class Architecture(Protocol):
    """Interface of the `Config` in every module of this folder."""

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network, with weights from torch's global generator.

        Args:
            classes: width of the output.
            image_shape: (C, H, W) of an image.

        Returns:
            A module that maps images (B, C, H, W) to logits (B, classes).
        """
        ...
