"""AugMix: an image mixed with a mixture of several chains of operations on it.

Paper: D. Hendrycks and others, "AugMix: a simple data processing method to improve robustness and uncertainty", ICLR
2020, arXiv:1912.02781. Its loss between several views of an image is not implemented.

    out = (1 - m) x + m sum_i w_i chain_i(x),    w ~ Dirichlet(1, …, 1) of `width`,    m ~ uniform[0, 1)
    chain_i: 1 to 3 operations, each of strength ~ uniform[0, strength / 10)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.policies import each_picture, operations, unit_of
from polyrhythm.augmentation.tones import Tones
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

_LONGEST = 3
_STRONGEST = 10
# Those of the paper, without the corruptions of ImageNet-C.
SPACE = [
    operation
    for number, operation in enumerate(
        operations(shear=0.3, move=1 / 3, pixels=False, turn=30, enhance=0.9, bits=4)
    )
    if number not in (0, 6, 7, 8, 9)
]


class AugMix(Config):
    """Mixtures of chains of operations.

    Attributes:
        strength: strength of operations at most, from 0 to 10.
        width: chains of an image.
    """

    strength: int = Field(default=3, ge=0, le=_STRONGEST)
    width: int = Field(default=3, ge=1, le=10)

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        drawn = -torch.stack([(1 - draws.uniform()).log() for _ in range(self.width)], 1).clamp_max(-1e-12)
        weights: list[list[float]] = (drawn / drawn.sum(1, keepdim=True)).tolist()
        mixed: list[float] = draws.uniform().tolist()
        chains = []
        for _ in range(self.width):
            length = draws.integers(1, _LONGEST).tolist()
            steps = [
                (
                    draws.integers(0, len(SPACE) - 1).tolist(),
                    draws.uniform(0, self.strength / _STRONGEST).tolist(),
                    draws.chance(0.5).tolist(),
                )
                for _ in range(_LONGEST)
            ]
            chains.append((length, steps))

        def change(image: Image, place: int) -> Tensor:
            own = unit_of(image)
            mixture = torch.zeros_like(own)
            for weight, (length, steps) in zip(weights[place], chains, strict=True):
                end = image
                for chosen, levels, signs in steps[: length[place]]:
                    operation, level = SPACE[chosen[place]], levels[place]
                    end = operation.act(end, -level if operation.signed and signs[place] else level)
                mixture += weight * unit_of(end)
            return (1 - mixed[place]) * own + mixed[place] * mixture

        return each_picture(images, tones, change)
