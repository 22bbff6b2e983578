"""Synchronous: an update is the mean of one gradient of every pusher, and no pusher continues before it.

Gradients are summed in the order of the pushers, not in that of their arrival, so the result does not depend on timing.

If a worker is lost, an update is the mean of the gradients of the remaining ones, and an earlier push of the
lost one counts as well. Its replacement enters at the same round on all servers. It takes the lost worker's
remaining steps, one per update, and so stays behind the others. If a server already has a step that another
server lacks, it treats the repeated push as an empty batch.
"""

from __future__ import annotations

from polyrhythm.communication.control_message import checked
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision, Gate, RoundsGate
from polyrhythm.strategies.state import State


class Synchronous(Consistency):
    """All wait for all."""

    def in_step(self) -> bool:
        return True

    def gathers(self, pushers: int) -> int:
        return pushers

    def spares(self, pushers: int) -> int:
        return pushers

    def gate(self, pushers: int) -> Gate:
        return SynchronousGate(pushers)


class SynchronousGate(RoundsGate):
    """Holds gradients until each present pusher has one; held pushes of lost pushers are included."""

    def __init__(self, pushers: int) -> None:
        super().__init__(pushers)
        self._orphans: list[int] = []
        """Lost pushers with a held gradient, which will not be answered."""

    def arrive(self, pusher: int, step: int) -> Decision:
        self.rounds.take(pusher, step)
        self.held.add(pusher)
        return self.decide()

    def leave(self, pusher: int) -> Decision:
        self.rounds.forget(pusher)
        self.present.discard(pusher)
        if pusher in self.held:
            self.held.discard(pusher)
            self._orphans.append(pusher)
        return self.decide()

    def join(self, pusher: int) -> None:
        """End no round until this pusher has announced its first round."""
        self.rounds.invite(pusher, later=pusher in self._orphans)

    def load_state(self, state: State) -> None:
        """Restore nothing, or, from older checkpoints, lost pushers with a gradient that will not be repeated."""
        self._orphans = checked(state[1].get("orphans", []), list[int])

    @property
    def _is_empty(self) -> bool:
        return not (self.present or self._orphans)

    def decide(self) -> Decision:
        if self.rounds.held_up:
            return Decision()
        entered = self.admit(alone=self._is_empty)
        if not (self.held or self._orphans) or not self.held >= self.present:
            return Decision(answer=entered)
        answer = tuple(sorted(self.held))
        apply = tuple(sorted([*answer, *self._orphans]))
        self.rounds.number += bool(answer)
        self.held, self._orphans = set(), []
        return Decision(apply=apply, answer=tuple(sorted(answer + self.admit(alone=self._is_empty))))
