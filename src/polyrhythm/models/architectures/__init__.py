"""The project's own networks: every module in this folder is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


class Architecture(Protocol):
    """What every module's `Config` here can do."""

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Makes the network; its weights come from torch's global generator.

        Args:
            classes: width of the output.
            image_shape: (C, H, W) of a picture.

        Returns:
            A module that maps pictures (B, C, H, W) to logits (B, classes).
        """
        ...
