"""Links, flows, and bundles: flows that always have the same rate, and when the next of them ends.

All flows of a bundle have received the same number of bytes since any moment, so one running count serves them all:
a flow ends when the count has risen by its size since it joined. That makes a change of rate O(1), however many
flows there are.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from polyrhythm.communication.transports.simulated.network import Action


class Link:
    """One direction of a wire, and who crosses it.

    Attributes:
        number: tells it apart from all others of the network.
        bandwidth: in bytes/s.
        flows: in the order of their arrival.
        bundles: how many flows of each bundle cross it; of one that is coupled by it all do, and nobody counts.
        coupling: whether it is asked when rates are computed, because it may be full.
        roomy: for how many changes on end it has been coupling and had room left.
    """

    __slots__ = ("bandwidth", "bundles", "coupling", "flows", "number", "roomy")

    def __init__(self, number: int, bandwidth: float) -> None:
        self.number = number
        self.bandwidth = bandwidth
        self.flows: dict[Flow, None] = {}
        self.bundles: dict[Bundle, int] = {}
        self.coupling = False
        self.roomy = 0

    def cross_less(self, bundle: Bundle) -> None:
        """A flow of a bundle crosses it no more."""
        crossings = self.bundles[bundle]
        if crossings > 1:
            self.bundles[bundle] = crossings - 1
        else:
            del self.bundles[bundle]
            bundle.allowed.pop(self, None)

    def load(self) -> float:
        """Gives what crosses it now, in bytes/s."""
        if self.coupling:
            return sum([bundle.rate * bundle.size for bundle in self.bundles])
        return sum([bundle.rate * flows for bundle, flows in self.bundles.items()])


class Way:
    """The way from one rank to another, and what the last flow on it has found, which the next finds again mostly.

    Attributes:
        links: that flows on it cross.
        latency_s: between a flow's last byte's leaving and its arrival.
        bundle: of the coupling links among them; None if there were none.
        loose: the others.
    """

    __slots__ = ("bundle", "latency_s", "links", "loose")

    def __init__(self, links: tuple[Link, ...], latency_s: float) -> None:
        self.links = links
        self.latency_s = latency_s
        self.bundle: Bundle | None = None
        self.loose: tuple[Link, ...] = ()


class Flow:
    """One transfer under way.

    Attributes:
        way: that it takes.
        sent: called when the last byte has left.
        arrived: called when it is there.
        left: bytes to go when it joined its bundle.
        bundle: where it is now.
        target: the bundle's count at which it ends.
    """

    __slots__ = ("arrived", "bundle", "left", "sent", "target", "way")

    def __init__(self, way: Way, sent: Action, arrived: Action, nbytes: float) -> None:
        self.way = way
        self.sent = sent
        self.arrived = arrived
        self.left = nbytes
        self.bundle: Bundle | None = None
        self.target = 0.0


class Bundle:
    """Flows of one rate.

    Attributes:
        links: the coupling links that its flows cross.
        limit: the most that a flow may get, in bytes/s.
        rate: what a flow gets now, in bytes/s.
        size: how many flows there are.
        ends_at_s: when the next of them ends at the present rate; infinity if that is not known.
        alarm_at_s: when the network will look at it next; infinity if it will not.
        alarm: what looks at it then, once there has been one.
        allowed: up to which rate the links that are not coupling are known to have room for its flows.
    """

    __slots__ = (
        "_allowances",
        "_count",
        "_counted_at",
        "_ends",
        "_joined",
        "_strangers",
        "alarm",
        "alarm_at_s",
        "allowed",
        "ends_at_s",
        "limit",
        "links",
        "rate",
        "size",
    )

    def __init__(self, links: tuple[Link, ...], limit: float = inf) -> None:
        self.links = links
        self.limit = limit
        self.rate = 0.0
        self.size = 0
        self.ends_at_s = inf
        self.alarm_at_s = inf
        self.alarm: Action | None = None
        self.allowed: dict[Link, float] = {}
        self._count = 0.0
        self._counted_at = 0.0
        self._ends: list[tuple[float, int, Flow]] = []
        self._joined = 0
        self._strangers = 0
        self._allowances: list[tuple[float, int, Link]] = []

    def admit(self, flow: Flow, now_s: float) -> bool:
        """Does what `join` and `refill` do, where the rate does not rise; else nothing. Called when some are there.

        Returns:
            Whether it has.
        """
        size = self.size + 1
        rate = self.limit
        for link in self.links:
            if len(link.bundles) > 1:
                return False
            share = link.bandwidth / size
            rate = share if share < rate else rate
        before = self.rate
        if rate > before:
            return False
        ends = self._ends
        self._count = count = self._count + before * (now_s - self._counted_at)
        self._counted_at = now_s
        self.size = size
        self.rate = rate
        self._joined = joined = self._joined + 1
        flow.bundle = self
        flow.target = target = count + flow.left
        heappush(ends, (target, joined, flow))
        if self._strangers:
            self._forget_strangers()
        left = ends[0][0] - count
        self.ends_at_s = now_s + (left / rate if left > 0 else 0.0)
        return True

    def refill(self) -> bool:
        """Takes all that its links have, and plans; called when a flow has just come or gone, and some are left.

        Returns:
            False, and nothing has been changed, where it shares a coupling link with another.
        """
        rate, size = self.limit, self.size
        for link in self.links:
            if len(link.bundles) > 1:
                return False
            share = link.bandwidth / size
            rate = share if share < rate else rate
        self.rate = rate
        if self._strangers:
            self._forget_strangers()
        left = self._ends[0][0] - self._count
        self.ends_at_s = self._counted_at + (left / rate if left > 0 else 0.0)
        return True

    def change_rate(self, rate: float, now_s: float) -> None:
        """Lets its flows go on at another rate from now on."""
        self._count += self.rate * (now_s - self._counted_at)
        self._counted_at = now_s
        self.rate = rate

    def join(self, flow: Flow, now_s: float) -> None:
        """Takes in a flow."""
        if self.size:
            self._count += self.rate * (now_s - self._counted_at)
        else:  # a short count keeps its digits
            self._count = 0.0
            self._ends.clear()
            self._strangers = 0
        self._counted_at = now_s
        self.size += 1
        self._joined += 1
        flow.bundle = self
        flow.target = self._count + flow.left
        heappush(self._ends, (flow.target, self._joined, flow))

    def leave(self, flow: Flow, now_s: float) -> None:
        """Lets a flow go; `flow.left` is up to date afterwards."""
        self._count += self.rate * (now_s - self._counted_at)
        self._counted_at = now_s
        self.size -= 1
        self._strangers += 1  # it keeps its place in the line
        flow.left = max(0.0, flow.target - self._count)
        flow.bundle = None

    def plan(self) -> None:
        """Finds out when the next flow ends at the present rate."""
        if not self.size:
            self.ends_at_s = inf
            return
        if self._strangers:
            self._forget_strangers()
        left = self._ends[0][0] - self._count
        self.ends_at_s = self._counted_at + (left / self.rate if left > 0 else 0.0)

    def end_next(self, now_s: float) -> list[Flow]:
        """Ends the flow that is next, and all that end with it; called when its time has come, after `plan`."""
        ends = self._ends
        count, _, flow = heappop(ends)  # the count as it was planned, whatever rounding says
        self._count, self._counted_at = count, now_s
        self.size -= 1
        flow.bundle = None
        ended = [flow]
        if self._strangers and self.size:
            self._forget_strangers()
        while self.size and ends[0][0] <= count:
            flow = heappop(ends)[2]
            self.size -= 1
            flow.bundle = None
            ended.append(flow)
            if self._strangers and self.size:
                self._forget_strangers()
        return ended

    def allow(self, link: Link, rate: float) -> None:
        """Notes that a link which is not coupling has room for its flows up to a rate."""
        if self.allowed.get(link) == rate:
            return
        if len(self._allowances) > 2 * len(self.allowed) + 64:  # most are of links that it crosses no more
            self._allowances = [(kept, at.number, at) for at, kept in self.allowed.items()]
            heapify(self._allowances)
        self.allowed[link] = rate
        heappush(self._allowances, (rate, link.number, link))

    def outgrown(self) -> list[Link]:
        """Gives, and forgets, the links that had room for less than the present rate."""
        links: list[Link] = []
        while self._allowances and self._allowances[0][0] < self.rate:
            rate, _, link = heappop(self._allowances)
            if self.allowed.get(link) == rate:
                del self.allowed[link]
                links.append(link)
        return links

    def _forget_strangers(self) -> None:
        """Forgets, before whoever is next, those that left, and perhaps came back with another target."""
        ends = self._ends
        while self._strangers:
            target, _, flow = ends[0]
            if flow.bundle is self and flow.target == target:
                break
            heappop(ends)
            self._strangers -= 1
