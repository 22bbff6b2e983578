"""Random generators as pure functions of what they are for, so that timing and resuming change nothing."""

from __future__ import annotations

from hashlib import sha256

import torch


def seed_for(purpose: str, *numbers: int) -> int:
    """Gives a seed, of the 32 bits that torch's CPU generator uses, from a purpose and numbers such as the epoch."""
    digest = sha256(repr((purpose, *map(int, numbers))).encode()).digest()
    return int.from_bytes(digest[:4], "little")


def generator_for(purpose: str, *numbers: int) -> torch.Generator:
    """Gives a CPU generator whose stream depends on its purpose and numbers alone."""
    return torch.Generator().manual_seed(seed_for(purpose, *numbers))
