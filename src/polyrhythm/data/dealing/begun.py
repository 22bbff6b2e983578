"""What other numbers of workers have taken of epochs that are not over: what is left of these is dealt out anew.

    order       a b c d e f g h i j k l m     2 workers, b = 2: worker 0 did two steps, worker 1 one
    worker 0    a   c   e   g
    worker 1      b   d
    left                  f   h i j k l m     is what 3 workers, or however many, share as if it were the epoch's order

An epoch that was dealt out several times is described by several stretches, one after another; each says how many
steps each of its workers did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Stretch = tuple[int, ...]
"""Steps that each of so many workers did."""


@dataclass(frozen=True)
class Begun:
    """The epochs that others began.

    Attributes:
        epochs: their stretches, oldest first, by the epoch's number. Whatever comes before the first of them is over.
        left_out: images, over all earlier epochs, of steps that count as done and that servers left out.
    """

    epochs: Mapping[int, tuple[Stretch, ...]] = field(default_factory=dict)
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """Gives a JSON-able dict; empty where nothing was begun by others."""
        if not self.epochs and not self.left_out:
            return {}
        told = {str(epoch): [list(steps) for steps in stretches] for epoch, stretches in self.epochs.items()}
        return {"epochs": told, "left_out": self.left_out}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Begun:
        """Reads what `to_json` gave."""
        epochs = {
            int(epoch): tuple(tuple(map(int, steps)) for steps in stretches)
            for epoch, stretches in told.get("epochs", {}).items()
        }
        return cls(epochs, int(told.get("left_out", 0)))


def left_of(order: Tensor, stretches: Sequence[Stretch], batch_size: int) -> Tensor:
    """Gives what nobody has taken of an epoch, in its order.

    Args:
        order: of the epoch, `(n,)` int64.
        stretches: in which it was begun.
        batch_size: of each worker, in all of them.

    Returns:
        `(m,)` int64, with m <= n.
    """
    for stretch in stretches:
        workers, places = len(stretch), torch.arange(len(order))
        together = workers * batch_size
        done = torch.tensor(stretch)[places % together % workers]
        order = order[places // together >= done]
    return order


def images_left(n: int, stretches: Sequence[Stretch], batch_size: int) -> int:
    """Gives how many images `left_of` would give, of an epoch of `n`."""
    return len(left_of(torch.arange(n), stretches, batch_size)) if stretches else n
