"""Random generators as pure functions of their purpose, independent of timing and of resuming."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import torch

_STRIDE = 0x5851F42D4C957F2D
"""Odd, so that no two samples of an epoch share a key."""


def seed_for(purpose: str, *numbers: int) -> int:
    """Return a seed, of the 32 bits that torch's CPU generator uses, for a purpose and numbers such as the epoch."""
    digest = sha256(repr((purpose, *map(int, numbers))).encode()).digest()
    return int.from_bytes(digest[:4], "little")


def seeds_for(purpose: str, first: int, *others: int) -> Callable[[int], int]:
    """Return a function of one more number that returns `seed_for` of all of them, in a third of its time."""
    begun = sha256(repr((purpose, int(first), *map(int, others))).removesuffix(")").encode() + b", ")

    def seed(number: int) -> int:
        digest = begun.copy()
        digest.update(b"%d)" % number)
        return int.from_bytes(digest.digest()[:4], "little")

    return seed


def generator_for(purpose: str, *numbers: int) -> torch.Generator:
    """Return a CPU generator with a stream that depends only on its purpose and numbers."""
    return torch.Generator().manual_seed(seed_for(purpose, *numbers))


def sample_keys(purpose: str, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Return a key for every sample, (B,) int64, from its number in the data set; batch and worker do not matter."""
    digest = sha256(repr((purpose, int(seed), int(epoch))).encode()).digest()
    return indices * _STRIDE + int.from_bytes(digest[:8], "little", signed=True)
