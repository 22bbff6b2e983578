"""New divisions of an epoch's rest, after synchronous workers have failed or joined in the middle of it.

All workers must begin a division with the same batch, though they learn of a failure at different batches:

    worker 0   batch 5 ─ step 5 ✝ posts 6 ────── step 5 ─ batch 6, dealt among those present
    worker 1   batch 5 ─ step 5 ✝ posts 6 ────── step 5 ─ batch 6
    worker 2   batch 5 ✝

    view of the others: each posts how many batches it has taken; the division begins with the greatest number

The first worker that needs a division posts it. A posted division holds, even if the next view follows before it
begins. A replacement reads the divisions of its epoch. Until its own share begins, it repeats images of others with
weight 0, since they have taken all.

A loop may take a batch before the step of the one before. Then all batches of the failed worker's missing steps are
dealt again (`EpochProgress.taken_before`), and a replacement enters with the next epoch: until its second step, batches
fetched ahead look like several batches of one step, so its first weights would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polyrhythm.api.loop.position import ALL
from polyrhythm.api.loop.shard import Division
from polyrhythm.api.loop.store_board import StoreBoard

Epoch = tuple[int, int]
"""Number of a loop over epochs, and of an epoch in it."""


@dataclass(frozen=True)
class View:
    """Membership view, for divisions of the rest of an epoch.

    Attributes:
        name: unique name.
        members: indices of its workers.
        lost: first step without effect of each worker that has failed, by its index.
    """

    name: str
    members: tuple[int, ...]
    lost: dict[int, int]


class Undealt(Protocol):
    """Loader of the images that are divided."""

    def undealt(self, divisions: Sequence[Division], since: dict[int, int], until: int) -> tuple[int, ...]:
        """Return the positions in the order that were dealt to failed workers, or were to be dealt in addition."""


class Divisions:
    """Divisions of the current epoch, for one worker.

    Args:
        worker: index of the worker.
        board: board of the workers.

    Attributes:
        has_share: whether this worker has a share of the epoch; not yet, where it was admitted in the middle.
    """

    def __init__(self, worker: int, board: StoreBoard) -> None:
        self.has_share = True
        self._worker = worker
        self._board = board
        self._views: list[View] = []
        self._epoch: Epoch | None = None
        self._known: list[Division] = []
        self._latest = 0

    def formed(self, view: View, epoch: Epoch | None, taken: int, *, divides: bool) -> None:
        """Note a new view; called on all its members.

        Args:
            view: the view.
            epoch: current epoch of this worker; None: it is in none.
            taken: batches of it that this worker has taken; `ALL`: it has ended.
            divides: whether this worker's batches can be dealt again.
        """
        self._views.append(view)
        at = None if epoch is None else [*epoch, taken]
        place = {"at": at, "divides": divides, "has_share": self.has_share}
        self._board.post(_place_key(view, self._worker), json.dumps(place))

    def begin(self, epoch: Epoch, members: tuple[int, ...]) -> None:
        """Begin an epoch, or continue in it as a replacement.

        Args:
            epoch: the epoch.
            members: workers among which it was divided at its beginning.
        """
        self._epoch, self._latest = epoch, 0
        self._known = [Division(0, members, len(members))]
        while self._read_next():
            pass

    @property
    def latest(self) -> Division:
        """Division according to which this worker takes batches."""
        return self._known[self._latest]

    def after(self, taken: int, loader: Undealt, batches_before: Callable[[int], int]) -> Division | None:
        """Return the division that this worker follows after some batches of the epoch; None: the one before.

        Args:
            taken: number of batches taken.
            loader: loader of the batches.
            batches_before: function that returns the number of batches taken before a step.
        """
        while self._views and self._divide(taken, loader, batches_before):
            pass
        due = [
            number
            for number, division in enumerate(self._known)
            if number > self._latest and division.begins <= taken and self._worker in division.members
        ]
        if not due:
            return None
        self._latest = due[-1]
        self.has_share = True
        return self.latest

    def _divide(self, taken: int, loader: Undealt, batches_before: Callable[[int], int]) -> bool:
        """Handle the latest view, unless that is due later; return whether something was found."""
        assert self._epoch is not None, "an epoch has begun"
        if self._read_next():
            return True
        view = self._views[-1]
        places = self._places(view)
        if places is None:  # the next view has been formed since
            return True
        loop, number, most = max(place["at"] for place in places.values() if place["at"])
        ends = (loop, number) < self._epoch or most == ALL
        if ends or not all(place["divides"] for place in places.values()):
            self._views.clear()
            return False
        begins = max(most, self._known[-1].begins)
        if (loop, number) > self._epoch or (not self.has_share and taken < begins):
            return False
        if not self.has_share:  # it does not know what others have taken
            self._board.await_one([self._key], "the others to divide the rest of the epoch")
            return True
        since = {
            worker: batches_before(step)
            for worker, step in view.lost.items()
            if worker in self._known[-1].members
            and (worker not in view.members or not places[worker]["has_share"])
        }
        extras = loader.undealt(self._known, since, begins)
        self._board.post_if_absent(self._key, json.dumps([view.name, begins, view.members, extras]))
        return True

    def _places(self, view: View) -> dict[int, dict[str, Any]] | None:
        """Return the places of a view's members when it was formed; None: it is not the latest one any more."""
        keys = [_place_key(view, member) for member in view.members]

        def look() -> list[str] | None:
            return [] if self._views[-1] is not view else self._board.read_all(keys)

        texts = self._board.await_found(look, "the others to regroup")
        return dict(zip(view.members, map(json.loads, texts), strict=True)) if texts else None

    def _read_next(self) -> bool:
        """Read the next division, if it was posted; return whether it was."""
        text = self._board.read(self._key)
        if text is None:
            return False
        name, begins, members, extras = json.loads(text)
        self._known.append(Division(begins, tuple(members), self._known[0].batches, tuple(extras)))
        names = [view.name for view in self._views]
        if name in names:  # earlier ones have been followed by it before anyone has divided anything
            del self._views[: names.index(name) + 1]
        return True

    @property
    def _key(self) -> str:
        assert self._epoch is not None, "an epoch has begun"
        return f"script/division/{self._epoch[0]}.{self._epoch[1]}/{len(self._known)}"


def _place_key(view: View, worker: int) -> str:
    return f"script/taken/{view.name}/{worker}"
