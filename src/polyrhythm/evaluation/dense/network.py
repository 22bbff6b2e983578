"""What a network becomes that is applied at every place of a picture."""

from __future__ import annotations

from torch import Tensor, nn


class NotConvertible(Exception):
    """A network cannot be made fully convolutional; the text is the reason."""


class DenseNetwork(nn.Module):
    """A network that gives one vector of scores a place, and their mean.

    Args:
        convolutional: maps (B, C, H, W) to scores (B, classes, h, w).
    """

    def __init__(self, convolutional: nn.Module) -> None:
        super().__init__()
        self.convolutional = convolutional

    def score_map(self, images: Tensor) -> Tensor:
        """Gives the scores of every place, (B, classes, h, w), of images (B, C, H, W)."""
        scores: Tensor = self.convolutional(images)
        return scores

    def forward(self, images: Tensor) -> Tensor:
        """Gives the class scores (B, classes) of images (B, C, H, W), averaged over all places."""
        return self.score_map(images).mean((2, 3))
