"""JPEG compression: a picture that was saved too small.

out = JPEG(x, quality);    quality = 25, 18, 15, 10, 7
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from polyrhythm.errors import RequestError
from polyrhythm.evaluation.corruption import Corruption

if TYPE_CHECKING:
    from torch import Tensor

_QUALITIES = (25, 18, 15, 10, 7)
_MODES = {1: "L", 3: "RGB"}


class JpegCompression(Corruption):
    """Blocks and ringing edges."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Saves and opens again; see `Corruption.spoil`.

        Raises:
            RequestError: the pictures have neither one channel nor three.
        """
        if images.shape[1] not in _MODES:
            raise RequestError(f"pictures of {images.shape[1]} channels cannot be saved as JPEG: 1 or 3 can")
        return torch.stack([_saved(image, _QUALITIES[severity - 1]) for image in images])


def _saved(image: Tensor, quality: int) -> Tensor:
    content = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = BytesIO()
    channels = content.shape[2]
    Image.fromarray(content.squeeze(2) if channels == 1 else content).save(file, "JPEG", quality=quality)
    opened = np.asarray(Image.open(file)).reshape(content.shape)
    return torch.from_numpy(opened.copy()).permute(2, 0, 1).float() / 255
