"""A reunion: those who are left begin anew at one point, the mean of what they hold, and all take it or none does.

    tell     each says how far it has come        an all-reduce of a few numbers
    bring    point = sum_j x_j / sum_j a_j        an all-reduce of the model; a_j: mass, in D-PSGD 1
    take     all have the point                   an all-reduce of a few numbers

Where all who brought something are lost before it was met about, what they handed on is brought in its place.

If the last breaks, those who have heard that all have the point take it, and the others take it when they tell next. So
what anybody holds is counted once, however often a reunion breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator

_NEVER = -1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far one worker has come.

    Attributes:
        steps: that it has done.
        presented: steps that it had done when it last began to present the model.
        last: after which step it stops, as far as it knows; None: it does not.
    """

    steps: int
    presented: int = _NEVER
    last: int | None = None


class Reunion:
    """One worker's side.

    Args:
        take: makes a point, `(size,)`, what this worker holds.
    """

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self._take = take
        self._point: Tensor | None = None
        self._number = 0
        self._taken = 0

    def tell(self, workers: Communicator, own: Progress, like: Tensor) -> list[Progress]:
        """Tells the others how far this worker has come, and takes a point that others have taken already.

        Args:
            workers: all that are there.
            own: of this worker.
            like: a tensor on the device that the communicator moves tensors of.

        Raises:
            PeerLost: somebody is gone.
        """
        last = _NEVER if own.last is None else own.last
        table = _gathered(workers, [own.steps, own.presented, last, self._number, self._taken], like)
        if self._point is not None and any(row[4] == self._number for row in table):
            self._accept()
        self._point = None
        self._number = max(max(row[3], row[4]) for row in table)
        return [
            Progress(steps=row[0], presented=row[1], last=None if row[2] == _NEVER else row[2])
            for row in table
        ]

    def meet(self, workers: Communicator, held: Tensor, mass: float, *, brings: bool = True) -> None:
        """Takes the point that all come to.

        Args:
            workers: all that are there, who have told each other how far they have come.
            held: `(size,)`, what this worker holds, multiplied by its mass.
            mass: of it.
            brings: whether that is its own; else it was handed on, and counts only where nobody brings anything.

        Raises:
            PeerLost: somebody is gone.
        """
        whole = torch.cat([held, held.new_tensor([mass])])
        total = whole if brings else torch.zeros_like(whole)
        workers.all_reduce(total)
        if total[-1] == 0:  # nobody has brought anything, and `whole` is as it was
            total = whole
            workers.all_reduce(total)
        self._point = total[:-1].div_(total[-1])
        self._number += 1
        _gathered(workers, [], total)
        self._accept()

    def _accept(self) -> None:
        assert self._point is not None, "there is a point to take"
        self._take(self._point)
        self._point, self._taken = None, self._number


def _gathered(workers: Communicator, own: Sequence[int], like: Tensor) -> list[list[int]]:
    """Gives the numbers of all workers, in their order; nobody gets them before all have come."""
    table = torch.zeros(workers.size, len(own) + 1, dtype=torch.float64, device=like.device)
    table[workers.rank] = table.new_tensor([*own, 1])
    flat = table.flatten()
    workers.all_reduce(flat)
    return [[int(value) for value in row] for row in flat.view(workers.size, -1)[:, :-1].tolist()]
