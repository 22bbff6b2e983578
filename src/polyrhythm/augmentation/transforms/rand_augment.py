"""RandAugment: some random operations an image, all of one strength.

Paper: E. Cubuk, B. Zoph, J. Shlens, Q. Le, "RandAugment: practical automated data augmentation with a reduced search
space", CVPR Workshops 2020, arXiv:1909.13719.

    x <- o(x, s strength / 30)    for `count` times,    o ~ uniform over 14 operations,  s ~ uniform{-1, 1}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from polyrhythm.augmentation.policies import each_picture, operations
from polyrhythm.augmentation.tones import Tones
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

STRONGEST = 30
SPACE = operations(shear=0.3, move=150 / 331, pixels=False, turn=30, enhance=0.9, bits=4)


class RandAugment(Config):
    """Some operations of one strength for every image.

    Attributes:
        count: count of operations.
        strength: strength from 0 to 30.
    """

    count: int = Field(default=2, ge=1, le=10)
    strength: int = Field(default=9, ge=0, le=STRONGEST)

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        drawn = [
            (draws.integers(0, len(SPACE) - 1).tolist(), draws.chance(0.5).tolist())
            for _ in range(self.count)
        ]

        def change(image: Image, place: int) -> Image:
            for chosen, signs in drawn:
                operation, level = SPACE[chosen[place]], self.strength / STRONGEST
                image = operation.act(image, -level if operation.signed and signs[place] else level)
            return image

        return each_picture(images, tones, change)
