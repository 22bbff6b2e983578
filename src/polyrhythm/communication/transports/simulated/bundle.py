"""Flows that always have the same rate, and when the next of them ends.

All flows of a bundle have received the same number of bytes since any moment, so one running count serves them all:
a flow ends when the count has risen by its size since it joined. That makes a change of rate O(1), however many
flows there are.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf

from polyrhythm.communication.transports.simulated.network import Action


@dataclass(eq=False, slots=True)
class Flow:
    """One transfer under way.

    Attributes:
        links: numbers of the links that it crosses.
        latency_s: between its last byte's leaving and its arrival.
        sent: called when the last byte has left.
        arrived: called when it is there.
        left: bytes to go when it joined its bundle.
        bundle: where it is now.
        target: the bundle's count at which it ends.
    """

    links: tuple[int, ...]
    latency_s: float
    sent: Action
    arrived: Action
    left: float
    bundle: Bundle | None = None
    target: float = 0.0


@dataclass(eq=False)
class Bundle:
    """Flows of one rate.

    Attributes:
        number: tells it apart from all others of the network.
        links: the contended links that its flows cross.
        limit: the most that a flow may get, in bytes/s.
        rate: what a flow gets now, in bytes/s.
        size: how many flows there are.
        alarm: tells the latest planned end from earlier plans.
    """

    number: int
    links: tuple[int, ...]
    limit: float = inf
    rate: float = 0.0
    size: int = 0
    alarm: int = 0
    _count: float = 0.0
    _counted_at: float = 0.0
    _ends: list[tuple[float, int, Flow]] = field(default_factory=list)
    _joined: int = 0

    def pass_to(self, now_s: float) -> None:
        """Counts the bytes up to the present."""
        self._count += self.rate * (now_s - self._counted_at)
        self._counted_at = now_s

    def join(self, flow: Flow) -> None:
        """Takes in a flow; the count must be up to date."""
        if not self.size:  # a short count keeps its digits
            self._count = 0.0
            self._ends.clear()
        self.size += 1
        self._joined += 1
        flow.bundle = self
        flow.target = self._count + flow.left
        heapq.heappush(self._ends, (flow.target, self._joined, flow))

    def leave(self, flow: Flow) -> None:
        """Lets a flow go; the count must be up to date, and `flow.left` is afterwards."""
        self.size -= 1
        flow.left = max(0.0, flow.target - self._count)
        flow.bundle = None

    def next_end_s(self) -> float:
        """When the next flow ends at the present rate; infinity if there is none."""
        self._drop_strangers()
        if not self._ends:
            return inf
        return self._counted_at + max(0.0, self._ends[0][0] - self._count) / self.rate

    def end_next(self, now_s: float) -> list[Flow]:
        """Ends the flow that is next, and all that end with it; called when its time has come."""
        self._drop_strangers()
        self._count, self._counted_at = self._ends[0][0], now_s  # as it was planned, whatever rounding says
        ended = []
        while self._ends and self._ends[0][0] <= self._count:
            flow = heapq.heappop(self._ends)[2]
            self.leave(flow)
            ended.append(flow)
            self._drop_strangers()
        return ended

    def _drop_strangers(self) -> None:
        """Forgets flows that left for another bundle, and perhaps came back with another target."""
        while self._ends and (
            self._ends[0][2].bundle is not self or self._ends[0][2].target != self._ends[0][0]
        ):
            heapq.heappop(self._ends)
