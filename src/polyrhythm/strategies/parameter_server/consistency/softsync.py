"""n-softsync: an update is the mean of the next c gradients to arrive, from any pusher; there are no waits.

Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD for Distributed Deep Learning", IJCAI 2016, arXiv 1511.05950.

    w' = w - lr * (1/c) * sum of the next c gradients        c = floor(lambda / n), lambda pushers

n = `n`. With n = lambda this is the asynchronous consistency. With n = 1 an update takes as many gradients as there are
pushers, but there is no barrier: a quick pusher may have two of them. Mean staleness is about n.

Departure from the paper: when all have left, the remaining gradients become a last, smaller update.
"""

from __future__ import annotations

from pydantic import Field

from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision, Gate
from polyrhythm.strategies.state import StateField, reset


class Softsync(Consistency):
    """Updates gather gradients, and pushers do not wait for them.

    Attributes:
        n: updates while every pusher takes one step; 1 gathers the most.
    """

    n: int = Field(default=1, ge=1)

    def check(self, pushers: int) -> None:
        """Refuse more updates than gradients; a single pusher is plain training for every n."""
        if self.n > pushers > 1:
            raise RequestError(
                f"{self}: n is {self.n}, but only {pushers} push: ask for {pushers} at most, which is asynchronous"
            )

    def in_step(self) -> bool:
        return False

    def waits_for_slower(self) -> bool:
        return False

    def gathers(self, pushers: int) -> int:
        return max(1, pushers // self.n)

    def spares(self, pushers: int) -> int:
        return pushers

    def gate(self, pushers: int) -> Gate:
        return SoftsyncGate(pushers, self.gathers(pushers))


class SoftsyncGate(Gate):
    """Answers at once, and counts to c."""

    fields = (StateField("held", list[int], reset([], "server")),)

    def __init__(self, pushers: int, gathers: int) -> None:
        self._gathers = gathers
        self._present = set(range(pushers))
        self._held: list[int] = []

    def arrive(self, pusher: int, step: int) -> Decision:
        self._held.append(pusher)
        apply = self._taken() if len(self._held) == self._gathers else ()
        return Decision(apply=apply, answer=(pusher,))

    def leave(self, pusher: int) -> Decision:
        """Apply the remaining gradients when no pusher is present any more."""
        self._present.discard(pusher)
        return Decision(apply=() if self._present else self._taken())

    def join(self, pusher: int) -> None:
        self._present.add(pusher)

    def _taken(self) -> tuple[int, ...]:
        taken, self._held = tuple(sorted(self._held)), []
        return taken
