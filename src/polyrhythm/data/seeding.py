"""Random generators as pure functions of their purpose, so that timing and resuming change nothing."""

from __future__ import annotations

from hashlib import sha256

import torch

_STRIDE = 0x5851F42D4C957F2D
"""Odd, so that no two samples of an epoch share a key."""


def seed_for(purpose: str, *numbers: int) -> int:
    """Gives a seed, of the 32 bits that torch's CPU generator uses, from a purpose and numbers such as the epoch."""
    digest = sha256(repr((purpose, *map(int, numbers))).encode()).digest()
    return int.from_bytes(digest[:4], "little")


def generator_for(purpose: str, *numbers: int) -> torch.Generator:
    """Gives a CPU generator whose stream depends on its purpose and numbers alone."""
    return torch.Generator().manual_seed(seed_for(purpose, *numbers))


def sample_keys(purpose: str, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Gives every sample a key of its own, (B,) int64: the same in every batch, on every worker.

    Args:
        purpose: what the keys are for.
        seed: of the run.
        epoch: in which the sample is seen.
        indices: (B,) int64, the samples' numbers in their data set.
    """
    digest = sha256(repr((purpose, int(seed), int(epoch))).encode()).digest()
    return indices * _STRIDE + int.from_bytes(digest[:8], "little", signed=True)
