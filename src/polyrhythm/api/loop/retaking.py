"""Steps of a user's loop, repeated with a copy of their gradients when another worker is lost in the middle of one.

    backward ─▶ kept: a copy ─▶ exchange ✝ ─▶ regroup ─▶ kept ─▶ exchange, with those who are left

A user's loop cannot be asked to compute them again, and an exchange that broke may have changed some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from polyrhythm.errors import PeerLost
from polyrhythm.roles.regrouping.worker_group import WorkerGroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.step import Step

_NONE = Step(-1)


class Retaking:
    """Takes the steps of a user's loop; repeats each until it succeeds.

    Args:
        replica: whose steps.
        group: of the worker.

    Attributes:
        replica: as given.
    """

    def __init__(self, replica: Replica, group: WorkerGroup) -> None:
        self.replica = replica
        self._group = group
        self._kept: Tensor | None = None
        self._fresh: Tensor | None = None
        self._step = _NONE
        self._rate = 0.0
        replica.run_hook = self.run_or_retake

    def take(self, step: Step, learning_rate: float) -> None:
        """Exchanges the gradients and updates the parameters.

        Raises:
            PeerLost: a rank is gone without which the run cannot go on.
        """
        if not self._group.regroups:
            self._finish(step, learning_rate)
            return
        if (
            self.replica.part.uses_before_use
        ):  # the step before may not be whole, and its gradients are still kept
            self.run_or_retake(self.replica.part.settle)
        self._keep()
        self._step, self._rate = step, learning_rate
        self._group.step = step.number
        if self._group.run_or_regroup(partial(self._finish, step, learning_rate)) is None:
            self._again()
        self._group.step = step.number + 1

    def regroup(self) -> None:
        """Regroups with whoever is there, between two steps; a step that was half done is taken again.

        Raises:
            PeerLost: a rank is gone without which the run cannot go on.
        """
        self.run_or_retake(_called)

    def go_on_at(self, step: int) -> None:
        """Goes on with a step."""
        self._group.step = step

    def run_or_retake(self, act: Callable[[], object]) -> None:
        """Calls `act`, which communicates between two steps; if a worker is lost meanwhile, regroups and leaves it out.

        A step that was half done is taken again. Gradients that the next step has computed already are kept.

        Raises:
            PeerLost: a rank is gone without which the run cannot go on.
        """
        if not self._group.regroups:
            act()
            return
        if self._group.run_or_regroup(partial(self._saving, act)):
            return
        fresh, self._fresh = self._fresh, None
        self._again()
        while not self._group.run_or_regroup(partial(self._saving, self.replica.settle)):
            self._again()
        if fresh is not None:
            self.replica.flat.gradients.copy_(fresh)

    def _saving(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except PeerLost:
            if self._fresh is None:
                self.replica.flat.gather_gradients()
                self._fresh = self.replica.flat.gradients.clone()
            raise
        return True

    def _again(self) -> None:
        """Repeats the latest step until it succeeds, unless another worker has passed its update on."""
        while self._kept is not None and self._group.step <= self._step.number:
            self.replica.flat.gradients.copy_(self._kept)
            if self._group.run_or_regroup(partial(self._finish, self._step, self._rate)) is not None:
                self._group.step = self._step.number + 1

    def _finish(self, step: Step, learning_rate: float) -> bool:
        self.replica.begin(step)
        return self.replica.finish(learning_rate)

    def _keep(self) -> None:
        flat = self.replica.flat
        flat.gather_gradients()
        if self._kept is None:
            self._kept = flat.gradients.clone()
        else:
            self._kept.copy_(flat.gradients)


def _called() -> None:
    raise PeerLost(LEADER, "going on with the others")
