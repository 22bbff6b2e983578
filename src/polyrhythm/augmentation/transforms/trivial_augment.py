"""TrivialAugment: one random operation an image, of a random strength.

Paper: S. Müller, F. Hutter, "TrivialAugment: tuning-free yet state-of-the-art data augmentation", ICCV 2021,
arXiv:2103.10158; the wide space.

    out = o(x, s m / 30),    o ~ uniform over 14 operations,  m ~ uniform{0, …, 30},  s ~ uniform{-1, 1}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.augmentation.policies import each_picture, operations
from polyrhythm.augmentation.tones import Tones
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

BINS = 30
SPACE = operations(shear=0.99, move=32, pixels=True, turn=135, enhance=0.99, bits=2)


class TrivialAugment(Config):
    """One operation of a random strength for every image; there is nothing to tune."""

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        chosen, levels = draws.integers(0, len(SPACE) - 1).tolist(), draws.integers(0, BINS).tolist()
        signs = draws.chance(0.5).tolist()

        def change(image: Image, place: int) -> Image:
            operation, level = SPACE[chosen[place]], levels[place] / BINS
            changed: Image = operation.act(image, -level if operation.signed and signs[place] else level)
            return changed

        return each_picture(images, tones, change)
