"""A fixed part of labelled images is held out for testing, with the same share of every class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyrhythm.data.dealing.seeding import generator_for

if TYPE_CHECKING:
    from torch import Tensor

FRACTION = 0.2


def held_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Splits images in two, always the same way: a fifth of every class, and at least one image, is held out.

    A class of one image stays whole.

    Args:
        labels: (n,) int64.

    Returns:
        The indices to train and to test with, each ascending int64; together all of them, once.
    """
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        if len(members) == 1:
            continue
        shuffled = members[torch.randperm(len(members), generator=generator_for("hold-out", label))]
        tested[shuffled[: max(1, round(FRACTION * len(members)))]] = True
    return (~tested).nonzero().flatten(), tested.nonzero().flatten()
