"""Links that transfers share fairly: α–β with max–min contention.

    alone       M bytes take  α + M / (the smallest bandwidth on the way)
    together    every link is shared max–min fairly; rates change whenever a transfer begins or ends

The rates are found by progressive filling (`fair_rates`): Bertsekas, Gallager, "Data Networks", 2nd edition
1992, section 6.5.2.

    All rates rise together; when a link is full, the flows that cross it keep their rate and the others rise on.

A bundle is some flows that cross the same contended links, and so always have the same rate each. All of them
have received the same number of bytes since any moment, so one running count serves them all: a flow ends
when the count has risen by its size since it joined. That makes a change of rate O(1), however many flows
there are. Bundles with a limit of their own stop rising there. One pass of filling costs O(b log b) for b
crossings of links by bundles.

Which links are asked when rates are computed, and which flows are one bundle therefore (`Coupling`):

    loose       a link with spare capacity: it limits no flow and is not part of the computation
    coupling    a link that may be full: the bundles that cross it get their rates together

Rates that are max–min fair on the coupling links alone are so on all links, as long as no loose link carries
more than it can. So a loose link, when it is looked at, divides its spare capacity among its bundles: each
may rise by the same factor. It is looked at again only when a flow arrives at it, or when a bundle rises
above its allowance; if then it carries too much, it couples. A coupling link becomes loose again when it has
had spare capacity during as many changes as it has flows, so that moving them is paid for.

The cost of a change (`Sharing`): it touches only the bundles that are connected with it through coupling
links (`Component`). A thousand workers that push to four servers, with NICs that are full while the workers' are
not, are four bundles of a thousand flows, independent of each other: O(1) a flow where all have one size.
Flows that begin or end at the same instant are computed together, once. `ContendedNetwork` turns the rates
into times.

Most flows begin and end where little changes, and have a short way: a flow that shares no link needs no
bundle, and one that joins or leaves a bundle which shares its links with no other changes that bundle's rate
alone (`Sharing.settle_one`, `Bundle.end_one`). The result is bit for bit that of the general way.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple

from polyrhythm.communication.transports.simulated.network import Action, Network
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime


class Link:
    """One direction of a wire, and the flows that cross it.

    Attributes:
        number: number of the link in the network.
        bandwidth: bandwidth in bytes/s.
        flows: flows in the order of their arrival.
        bundles: number of flows of each bundle that cross it; not counted for bundles that it couples, since
            all of their flows do.
        coupling: whether it takes part in the computation of rates, because it may be full.
        lone: flow that crosses it, if that one shares no link.
        roomy: number of consecutive changes for which it has been coupling and had spare capacity.
    """

    __slots__ = ("bandwidth", "bundles", "coupling", "flows", "lone", "number", "roomy")

    def __init__(self, number: int, bandwidth: float) -> None:
        self.number = number
        self.bandwidth = bandwidth
        self.flows: dict[Flow, None] = {}
        self.bundles: dict[Bundle, int] = {}
        self.lone: Flow | None = None
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
        """Return its current throughput in bytes/s."""
        if self.coupling:
            return sum([bundle.rate * bundle.size for bundle in self.bundles])
        return sum([bundle.rate * flows for bundle, flows in self.bundles.items()])


class FlowPath:
    """Path from one rank to another, with the bundle of the last flow on it, which is mostly that of the next.

    Attributes:
        links: links that flows on it cross.
        latency_s: seconds from a flow's last byte sent to its arrival.
        bundle: bundle of the coupling links among them; None if there were none.
        key: key of that bundle; see `Coupling.bundles`.
        loose: the others.
    """

    __slots__ = ("bundle", "key", "latency_s", "links", "loose")

    def __init__(self, links: tuple[Link, ...], latency_s: float) -> None:
        self.links = links
        self.latency_s = latency_s
        self.bundle: Bundle | None = None
        self.key: tuple[tuple[Link, ...], float] = (), inf
        self.loose: tuple[Link, ...] = ()


class Flow:
    """One transfer in progress: its state in the network, and its callbacks; a message of a rank is one.

    Three of ten flows of a busy server share no link from beginning to end. They need no bundle: its fields
    are on the flow, and move to a bundle when another flow arrives at one of its links
    (`Sharing.bundle_lone`).

    Attributes:
        way: way that it takes.
        left: bytes to go when it joined its bundle.
        bundle: current bundle; None while it shares no link.
        target: the bundle's count at which it ends.
        alone: True, unlike that of a bundle, where both are passed on.
        rate: rate in bytes/s, while it shares no link.
        began_at_s: start of that rate.
        ends_at_s: end if it continues to share no link; infinity once another flow has arrived.
        met: bundle that it was put into then; None: no other flow has arrived.
    """

    __slots__ = ("began_at_s", "bundle", "ends_at_s", "left", "met", "rate", "target", "way")

    alone: ClassVar[Literal[True]] = True
    began_at_s: float
    bundle: Bundle | None
    ends_at_s: float
    left: float
    met: Bundle | None
    rate: float
    target: float
    way: FlowPath

    def sent(self) -> None:
        """Called when the last byte has left."""
        raise NotImplementedError

    def arrive(self) -> None:
        """Called when the last byte is there."""
        raise NotImplementedError


class CalledFlow(Flow):
    """A flow that calls what it was given when its last byte has left, and when that is there."""

    __slots__ = ("_arrived", "_sent")

    def __init__(self, sent: Action, arrived: Action, nbytes: float) -> None:
        self.left = nbytes
        self.bundle = None
        self._sent = sent
        self._arrived = arrived

    def sent(self) -> None:
        self._sent()

    def arrive(self) -> None:
        self._arrived()


class Bundle:
    """Flows of one rate.

    Attributes:
        links: the coupling links that its flows cross.
        limit: the most that a flow may get, in bytes/s.
        rate: present rate of a flow, in bytes/s.
        size: number of flows.
        ends_at_s: end of the next flow at the present rate; infinity if unknown.
        alarm_at_s: time of the network's next check; infinity if there is none.
        alarm: action at that time, once there has been one.
        alone: False, unlike that of a single flow.
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

    alone: ClassVar[Literal[False]] = False

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
        self._ends: deque[tuple[float, int, Flow]] = deque()
        """By target, then in the order of joining; for flows of one size it is the same order."""
        self._joined = 0
        self._strangers = 0
        self._allowances: list[tuple[float, int, Link]] = []

    def admit(self, flow: Flow, now_s: float) -> bool:
        """Do what `join` and `refill` do, where that is all there is to do. Called when some flows are there.

        Returns:
            False, and nothing has been done, where the flow shares a loose link, the bundle a coupling one, or the
            rate would rise.
        """
        loose = flow.way.loose
        # A loose link that another flow crosses may turn out to be full with this one.
        for link in loose:
            if len(link.flows) > 1 or link.coupling:
                return False
        size = self.size + 1
        rate = self.limit
        for link in self.links:
            if len(link.bundles) > 1:
                return False
            share = link.bandwidth / size
            rate = share if share < rate else rate
        before = self.rate
        # One more on a full link makes rates fall, which no loose link minds; rates that rise have to be looked at.
        if rate > before:
            return False
        self._count = count = self._count + before * (now_s - self._counted_at)
        self._counted_at = now_s
        self.size = size
        self.rate = rate
        self._joined = joined = self._joined + 1
        flow.bundle = self
        flow.target = target = count + flow.left
        ends = self._ends
        if target < ends[-1][0]:
            insort(ends, (target, joined, flow))
        else:
            ends.append((target, joined, flow))
        if self._strangers:
            self._forget_strangers()
        left = ends[0][0] - count
        self.ends_at_s = now_s + (left / rate if left > 0 else 0.0)
        for link in loose:
            link.bundles[self] = 1
        return True

    def end_one(self, now_s: float) -> Flow | None:
        """Do what `end_next` and then `refill` do, where that is all there is to do; called as `end_next` is.

        Returns:
            The flow, which crosses no link any more; None, and nothing has been done, where another ends with it, the
            bundle shares a coupling link, too few would be left to fill one, or a loose link might carry too much.
        """
        size, ends = self.size - 1, self._ends
        # Rates rise here: a loose link may have allowed no more, and with few flows left a link may have become
        # loose.
        if size < _FEWEST_LEFT or self._strangers or self.allowed:
            return None
        count, _, flow = ends[0]
        next_count = ends[1][0]
        if next_count <= count:
            return None
        rate = self.limit
        for link in self.links:
            if len(link.bundles) > 1:
                return None
            share = link.bandwidth / size
            rate = share if share < rate else rate
        ends.popleft()
        self._count, self._counted_at = count, now_s
        self.size = size
        self.rate = rate
        self.ends_at_s = now_s + (next_count - count) / rate
        flow.bundle = None
        for link in self.links:
            del link.flows[flow]
        for link in flow.way.loose:
            del link.flows[flow]
            bundles = link.bundles
            if bundles[self] == 1:
                del bundles[self]
            else:
                bundles[self] -= 1
        return flow

    def refill(self) -> bool:
        """Take the whole capacity of its links, and plan; called when a flow has just joined or left, and some remain.

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
        """Change the rate of its flows from now on."""
        self._count += self.rate * (now_s - self._counted_at)
        self._counted_at = now_s
        self.rate = rate

    def join(self, flow: Flow, now_s: float) -> None:
        """Add a flow."""
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
        ends = self._ends
        if ends and flow.target < ends[-1][0]:
            insort(ends, (flow.target, self._joined, flow))
        else:
            ends.append((flow.target, self._joined, flow))

    def leave(self, flow: Flow, now_s: float) -> None:
        """Remove a flow; `flow.left` is up to date afterwards."""
        self._count += self.rate * (now_s - self._counted_at)
        self._counted_at = now_s
        self.size -= 1
        self._strangers += 1  # it keeps its place in the line
        flow.left = max(0.0, flow.target - self._count)
        flow.bundle = None

    def plan(self) -> None:
        """Find out when the next flow ends at the present rate."""
        if not self.size:
            self.ends_at_s = inf
            return
        if self._strangers:
            self._forget_strangers()
        left = self._ends[0][0] - self._count
        self.ends_at_s = self._counted_at + (left / self.rate if left > 0 else 0.0)

    def end_next(self, now_s: float) -> list[Flow]:
        """End the next flow, and all that end with it; called at its time, after `plan`."""
        ends = self._ends
        count, _, flow = ends.popleft()  # the planned count, despite rounding
        self._count, self._counted_at = count, now_s
        self.size -= 1
        flow.bundle = None
        ended = [flow]
        if self._strangers and self.size:
            self._forget_strangers()
        while self.size and ends[0][0] <= count:
            flow = ends.popleft()[2]
            self.size -= 1
            flow.bundle = None
            ended.append(flow)
            if self._strangers and self.size:
                self._forget_strangers()
        return ended

    def allow(self, link: Link, rate: float) -> None:
        """Note that a link which is not coupling has room for its flows up to a rate."""
        if self.allowed.get(link) == rate:
            return
        if len(self._allowances) > 2 * len(self.allowed) + 64:  # most are of links that it crosses no more
            self._allowances = [(kept, at.number, at) for at, kept in self.allowed.items()]
            heapify(self._allowances)
        self.allowed[link] = rate
        heappush(self._allowances, (rate, link.number, link))

    def outgrown(self) -> list[Link]:
        """Return and forget the links that had room for less than the present rate."""
        links: list[Link] = []
        while self._allowances and self._allowances[0][0] < self.rate:
            rate, _, link = heappop(self._allowances)
            if self.allowed.get(link) == rate:
                del self.allowed[link]
                links.append(link)
        return links

    def _forget_strangers(self) -> None:
        """Forget, before the next one, those that left, and perhaps rejoined with another target."""
        ends = self._ends
        while self._strangers:
            target, _, flow = ends[0]
            if flow.bundle is self and flow.target == target:
                break
            ends.popleft()
            self._strangers -= 1


class Demand(NamedTuple):
    """Demand of a bundle.

    Attributes:
        links: keys of the links that all of its flows cross.
        flows: number of flows, at least one.
        limit: the most that each may get, in bytes/s.
    """

    links: tuple[Hashable, ...]
    flows: int
    limit: float = inf


def fair_rates(capacities: Mapping[Any, float], demands: Mapping[int, Demand]) -> dict[int, float]:
    """Return the rate of a flow of every bundle, in bytes/s.

    Args:
        capacities: capacities of each link, in bytes/s.
        demands: bundles by key; each crosses a link or has a limit.
    """
    across, rising = _crossings(demands)
    left = {link: capacities[link] for link in across}
    # A heap entry is a level at which something stops rising: the position breaks ties, always the same way.
    crossed = list(across)
    heap = [(left[link] / rising[link], position, True) for position, link in enumerate(crossed)]
    heap += [(demand.limit, key, False) for key, demand in demands.items() if demand.limit < inf]
    heapify(heap)
    rates: dict[int, float] = {}
    while len(rates) < len(demands):
        level, number, is_link = heappop(heap)
        link, stopping = None, [number]
        if is_link:
            link = crossed[number]
            if not rising[link]:
                continue
            share = left[link] / rising[link]
            if share > level:  # others have stopped below their share since; it fills up later
                heappush(heap, (share, number, True))
                continue
            stopping = across[link]
        for key in stopping:
            # It crosses another link that was full before this one.
            if key in rates:
                continue
            rates[key] = level
            links, flows, _ = demands[key]
            for other in links:
                if other is not link:  # which is full, and not asked again
                    rising[other] -= flows
                    rest = left[other] - level * flows
                    # Below 0 by rounding only.
                    left[other] = rest if rest > 0 else 0.0
    return rates


def _crossings(demands: Mapping[int, Demand]) -> tuple[dict[Any, list[int]], dict[Any, int]]:
    """Return the bundles that cross each link, by key, and how many flows that are; the first one's links first."""
    across: dict[Any, list[int]] = {}
    flows_across: dict[Any, int] = {}
    for key, (links, flows, _) in demands.items():
        for link in links:
            if link in across:
                across[link].append(key)
                flows_across[link] += flows
            else:
                across[link] = [key]
                flows_across[link] = flows
    return across, flows_across


class Component(NamedTuple):
    """Bundles that share coupling links with each other only.

    Attributes:
        bundles: bundles in the order in which they were found.
        bandwidths: bandwidths of all links that couple them, in the order in which the bundles cross them, in bytes/s.
    """

    bundles: list[Bundle]
    bandwidths: dict[Link, float]

    @classmethod
    def of(cls, bundle: Bundle) -> Component:
        """Find the component of a bundle."""
        found = {bundle: None}
        bandwidths = {link: link.bandwidth for link in bundle.links}
        todo = list(bundle.links)
        while todo:
            for other in todo.pop().bundles:
                if other not in found:
                    found[other] = None
                    for link in other.links:
                        if link not in bandwidths:
                            bandwidths[link] = link.bandwidth
                            todo.append(link)
        return cls(list(found), bandwidths)

    def rates(self) -> dict[int, float]:
        """Return the rates of a flow of each bundle, in bytes/s, by the place of the bundle."""
        demands = [Demand(bundle.links, bundle.size, bundle.limit) for bundle in self.bundles]
        return fair_rates(self.bandwidths, dict(enumerate(demands)))


_FEWEST_LEFT = 2
"""Flows of a bundle without which its link may have become loose."""
ROUNDING = 1e-12
"""By how much more than its bandwidth a link may seem to carry because sums are rounded, relatively."""
ROOMY = 0.9
"""A coupling link has room when it carries no more than this share of its bandwidth."""


class Coupling:
    """Every flow, in the bundle of the coupling links that it crosses.

    Attributes:
        changed: bundles that flows have joined or left, with rates that have not been looked at since.
        suspects: loose links that may carry too much.
        flows_moved: number of times that a flow has moved to another bundle than its first.
        bundles: bundles of coupling links, by these links and the limit of a flow.
    """

    def __init__(self) -> None:
        self.changed: dict[Bundle, None] = {}
        self.suspects: dict[Link, None] = {}
        self.flows_moved = 0
        self.bundles: dict[tuple[tuple[Link, ...], float], Bundle] = {}

    def take_in(self, flows: Iterable[Flow], now_s: float) -> None:
        """Find the bundles of new flows, which their links know already."""
        for flow in flows:
            for link in flow.way.links:
                if not link.coupling and len(link.flows) > 1:
                    self._foresee(flow, now_s)
                    break
        for flow in flows:
            self._put(flow, now_s)

    def forget(self, bundle: Bundle) -> None:
        """Forget a bundle without flows."""
        self.bundles.pop((bundle.links, bundle.limit), None)

    def suspect(self, bundle: Bundle) -> None:
        """Has the loose links looked at that had room for less than the present rate of a bundle."""
        for link in bundle.outgrown():
            self.suspects[link] = None

    def couple_overloaded(self, now_s: float) -> None:
        """Look at suspects: couple those that carry too much, and divide the room of the others."""
        suspects, self.suspects = self.suspects, {}
        overloaded = []
        for link in suspects:
            if link.coupling or len(link.flows) < 2:  # a single flow has the link's bandwidth as its limit
                continue
            room = link.bandwidth / link.load()
            if room < 1 - ROUNDING:
                overloaded.append(link)
            else:
                # All may rise by the same factor until it is full; each knows its bound, and the link is not asked
                # before one passes it.
                for bundle in link.bundles:
                    bundle.allow(link, bundle.rate * max(1.0, room))
        for link in overloaded:  # only now, since moved flows have no rate yet
            self.couple(link, True, now_s)

    def loosen(self, links: Iterable[Link], now_s: float) -> None:
        """Leave out, of links that got new rates, those that have had room for long."""
        roomy = []
        for link in links:
            link.roomy = link.roomy + 1 if link.load() <= ROOMY * link.bandwidth else 0
            # To loosen it moves all its flows: not before as many changes have paid for that.
            if link.roomy >= len(link.flows):
                roomy.append(link)
        for link in roomy:
            self.couple(link, False, now_s)

    def couple(self, link: Link, coupling: bool, now_s: float) -> None:
        """Ask a link from now on, or no more, and move its flows to the bundles that they belong to then."""
        link.coupling, link.roomy = coupling, 0
        for flow in list(link.flows):
            if flow.bundle is not None:
                self.flows_moved += 1
                self._take(flow.bundle, flow, now_s)
                self._put(flow, now_s)

    def _foresee(self, flow: Flow, now_s: float) -> None:
        """Couple the link that will stop a new flow if that is plain to see; whatever is missed is found later."""
        tightest, least = flow.way.links[0], inf
        for link in flow.way.links:
            share = link.bandwidth / len(link.flows)
            if share < least or (share == least and link.coupling):
                tightest, least = link, share
        if tightest.coupling or len(tightest.flows) == 1:
            return
        # Two that share it already have had it looked at, and it was not full: only newly shared capacity is
        # estimated.
        older = 0
        for other in tightest.flows:  # in the order of arrival: the new ones are last
            if other.bundle is not None:
                older += 1
                if older == 2:
                    return
            else:
                break
        self.couple(tightest, True, now_s)

    def _put(self, flow: Flow, now_s: float) -> None:
        """Put a flow into the bundle of the coupling links that it crosses."""
        coupling: tuple[Link, ...] = ()
        loose: tuple[Link, ...] = ()
        limit = room = inf
        for link in flow.way.links:
            bandwidth = link.bandwidth
            if link.coupling:
                coupling = (*coupling, link) if coupling else (link,)
                room = bandwidth if bandwidth < room else room
                continue
            loose = (*loose, link) if loose else (link,)
            limit = bandwidth if bandwidth < limit else limit
            if len(link.flows) > 1:
                self.suspects[link] = None
        key = coupling, limit if limit < room else inf
        bundle = self.bundles.get(key)
        if bundle is None:
            bundle = Bundle(*key)
            if coupling:  # a flow that shares nothing is alone: its count starts at 0, and its time is exact
                self.bundles[key] = bundle
        if coupling:
            flow.way.bundle, flow.way.key, flow.way.loose = bundle, key, loose
        bundle.join(flow, now_s)
        for link in loose:
            bundles = link.bundles
            bundles[bundle] = bundles.get(bundle, 0) + 1
        if bundle.size == 1:
            for link in coupling:
                link.bundles[bundle] = 1
        bundle.ends_at_s = inf
        self.changed[bundle] = None

    def _take(self, bundle: Bundle, flow: Flow, now_s: float) -> None:
        bundle.leave(flow, now_s)
        for link in flow.way.links:
            if link not in bundle.links:
                link.cross_less(bundle)
            elif not bundle.size:
                del link.bundles[bundle]
        bundle.ends_at_s = inf
        self.changed[bundle] = None


class Sharing:
    """All flows, in bundles, and their rates.

    Changes are collected by `begin` and `end_next`; `settle` gives the rates that follow from them.

    Args:
        bandwidths: bandwidths of the links, one direction each, in bytes/s.

    Attributes:
        links: links in order.
        rates_computed: number of times that the rate of a bundle has been computed.
        starting: flows that have begun since rates were given.
    """

    def __init__(self, bandwidths: Sequence[float]) -> None:
        self.links = [Link(number, bandwidth) for number, bandwidth in enumerate(bandwidths)]
        self.rates_computed = 0
        self.starting: list[Flow] = []
        self._coupling = Coupling()
        self._now_s = 0.0

    @property
    def flows_moved(self) -> int:
        """Number of times that a flow has moved to another bundle than its first."""
        return self._coupling.flows_moved

    def begin(self, flow: Flow) -> None:
        """Add a new flow."""
        for link in flow.way.links:
            link.flows[flow] = None
        self.starting.append(flow)

    def end_lone(self, flow: Flow) -> None:
        """End a flow that has shared no link; called at its time. No other rate changes."""
        for link in flow.way.links:
            del link.flows[flow]
            link.lone = None

    def end_next(self, bundle: Bundle, now_s: float) -> list[Flow]:
        """End the next flow of a bundle, and all that end with it; called at its time."""
        self._now_s = now_s
        ended, coupled = bundle.end_next(now_s), bundle.links
        if not coupled:  # it was alone, and no rate changes
            for link in ended[0].way.links:
                del link.flows[ended[0]], link.bundles[bundle]
            bundle.ends_at_s = inf
            return ended
        for flow in ended:
            for link in flow.way.links:
                flows = link.flows
                del flows[flow]
                if link not in coupled:
                    bundles = link.bundles
                    crossings = bundles[bundle]
                    if crossings > 1:
                        bundles[bundle] = crossings - 1
                        continue
                    del bundles[bundle]
                    if bundle.allowed:
                        bundle.allowed.pop(link, None)
                    continue
                if not bundle.size:
                    link.bundles.pop(bundle, None)
                if link.coupling and len(flows) == 1:
                    self._coupling.couple(link, False, now_s)
        self.note_change(bundle)
        return ended

    def settle(self, now_s: float) -> Iterable[Bundle | Flow]:
        """Give new rates to all flows that are connected with the changes.

        Returns:
            The bundles with a changed next end, or the new flow that shares no link.
        """
        found = self.settle_one(now_s)
        return self.settle_all(now_s) if found is None else (found,)

    def settle_one(self, now_s: float) -> Bundle | Flow | None:
        """Settle the one flow that has begun, where nothing else has changed, and no other rate must be looked at.

        Most flows begin so: they join the bundle of the last one on their way, or they share no link.

        Returns:
            The bundle that it has joined, or the flow, if it shares no link; None, and nothing has been done,
            where more is to be done.
        """
        starting, coupling = self.starting, self._coupling
        if len(starting) != 1 or coupling.changed:
            return None
        flow = starting[0]
        way = flow.way
        bundle = way.bundle
        if bundle is not None:
            if not bundle.size:  # a coupling link that has become loose has lost its bundles
                bundle = coupling.bundles.get(way.key)
            if bundle is not None and bundle.size:
                way.bundle = bundle
                if bundle.admit(flow, now_s):
                    starting.clear()
                    self.rates_computed += 1
                    return bundle
        limit = inf
        for link in way.links:
            if len(link.flows) > 1 or link.coupling:
                return None
            bandwidth = link.bandwidth
            limit = bandwidth if bandwidth < limit else limit
        for link in way.links:
            link.lone = flow
        flow.met, flow.rate, flow.began_at_s = None, limit, now_s
        left = flow.left
        flow.ends_at_s = now_s + (left / limit if left > 0 else 0.0)
        starting.clear()
        self.rates_computed += 1
        return flow

    def settle_all(self, now_s: float) -> Iterable[Bundle]:
        """Do what `settle` does, whatever has changed."""
        self._now_s = now_s
        starting, coupling = self.starting, self._coupling
        changed = coupling.changed
        met: Sequence[Bundle] = ()
        if starting:
            met = [self.bundle_lone(link.lone) for flow in starting for link in flow.way.links if link.lone]
            coupling.take_in(starting, now_s)
            starting.clear()
        # First as if no bundle shared a coupling link, which is so nearly always: the `else` is reached if it was.
        for bundle in changed:
            if not bundle.size:
                if not self._forget(bundle):
                    break
            elif bundle.refill():
                self.rates_computed += 1
                if bundle.allowed:
                    coupling.suspect(bundle)
            else:
                break
        else:  # none shares a coupling link with others
            if not coupling.suspects:
                coupling.changed = {}
                return (*changed, *met) if met else changed
            return self._planned(met, refilled=True)
        return self._planned(met, refilled=False)

    def _planned(self, met: Sequence[Bundle], *, refilled: bool) -> dict[Bundle, None]:
        """Do what `_settle_together` does, and find out when the next flows end, those of `met` among them."""
        touched = self._settle_together(refilled=refilled)
        touched.update(dict.fromkeys(met))
        for bundle in touched:
            bundle.plan()
        return touched

    def note_change(self, bundle: Bundle) -> None:
        """Note that a flow of a bundle has ended, for `settle_all`."""
        bundle.ends_at_s = inf  # the plan does not hold any more, even for this instant
        self._coupling.changed[bundle] = None

    def bundle_lone(self, flow: Flow) -> Bundle:
        """Return the bundle of a flow that had shared no link until now, as if it had been in it since it began."""
        flow.met = bundle = Bundle((), flow.rate)
        bundle.join(flow, flow.began_at_s)
        bundle.refill()
        bundle.alarm_at_s, flow.ends_at_s = bundle.ends_at_s, inf
        for link in flow.way.links:
            link.lone = None
            link.bundles[bundle] = 1
        return bundle

    def _forget(self, bundle: Bundle) -> bool:
        """Forget a bundle without flows; return False where others share a coupling link with it and get more now."""
        for link in bundle.links:
            if link.bundles:
                return False
        self._coupling.forget(bundle)
        return True

    def _settle_together(self, *, refilled: bool) -> dict[Bundle, None]:
        """Settle bundles that share links, and links that turn out to be full; return all bundles that it touches.

        Args:
            refilled: whether the changes have their new rates, and only links remain.
        """
        coupling, now_s = self._coupling, self._now_s
        touched: dict[Bundle, None] = {}
        loosened = False
        # A link that turns out to be full is coupled, which moves flows to other bundles, which need rates: until
        # nothing changes.
        while coupling.changed:
            changed, coupling.changed = coupling.changed, {}
            touched.update(changed)
            components = [] if refilled else self._components(changed, touched)
            refilled = False
            for component in components:
                for bundle in self._fill(component):
                    touched[bundle] = None
            if coupling.suspects:
                coupling.couple_overloaded(now_s)
            if components and not coupling.changed and not loosened:
                loosened = True  # once is enough: the rates are the same afterwards
                coupling.loosen([link for component in components for link in component.bandwidths], now_s)
        return touched

    def _components(self, changed: Iterable[Bundle], touched: dict[Bundle, None]) -> list[Component]:
        """Give new rates to bundles that share no coupling link; return the others, as they are connected."""
        components = []
        found: set[Bundle] = set()
        for bundle in changed:
            seeds: Iterable[Bundle] = (bundle,)
            if not bundle.size:
                self._coupling.forget(bundle)
                seeds = [seed for link in bundle.links if link.coupling for seed in link.bundles]
            for seed in seeds:
                if seed in found:
                    continue
                component = Component.of(seed)
                found.update(component.bundles)
                if len(component.bundles) > 1:
                    components.append(component)
                elif self._fill_alone(seed):
                    touched[seed] = None
        return components

    def _fill_alone(self, bundle: Bundle) -> bool:
        """Return the rate that `fair_rates` would give to a single bundle."""
        self.rates_computed += 1
        rate = bundle.limit
        for link in bundle.links:
            rate = min(rate, link.bandwidth / bundle.size)
        return self._give(bundle, rate)

    def _fill(self, component: Component) -> list[Bundle]:
        """Give new rates to the bundles of a component; return those with changed rates."""
        rates = component.rates()
        self.rates_computed += len(rates)
        return [bundle for place, bundle in enumerate(component.bundles) if self._give(bundle, rates[place])]

    def _give(self, bundle: Bundle, rate: float) -> bool:
        if rate == bundle.rate:
            return False
        bundle.change_rate(rate, self._now_s)
        if bundle.allowed:
            self._coupling.suspect(bundle)
        return True


_WAYS_KEPT = 1 << 16


class Route(NamedTuple):
    """The way of a message.

    Attributes:
        links: numbers of the links that it crosses, at least one, each once.
        latency_s: α of the whole way.
    """

    links: tuple[int, ...]
    latency_s: float


class ContendedNetwork(Network):
    """A network with links that all flows on them share; implements `Network`.

    Args:
        bandwidths: bandwidths of the links, one direction each, in bytes/s.
        route: function that returns the way from one global rank to another.
    """

    def __init__(
        self, time: VirtualTime, bandwidths: Sequence[float], route: Callable[[int, int], Route]
    ) -> None:
        self.sharing = Sharing(bandwidths)
        self._time = time
        self._soon = time.soon
        self._route = route
        self._settling = False
        self._settle_all: Action = self._settle  # bound once
        self._ways: dict[int, dict[int, FlowPath]] = {}  # by source and receiver; most go again and again
        self._ways_kept = 0

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        self.start(CalledFlow(sent, arrived, nbytes), source, to)

    def start(self, flow: Flow, source: int, to: int) -> None:
        """Start a flow now, with all of its bytes to go.

        Args:
            flow: flow that has no way yet.
            source: global rank of the sender.
            to: global rank of the receiver.
        """
        ways = self._ways.get(source)
        way = None if ways is None else ways.get(to)
        if way is None:
            way = self._find_way(source, to)
        flow.way = way
        for link in way.links:  # as `Sharing.begin` does
            link.flows[flow] = None
        self.sharing.starting.append(flow)
        if not self._settling:
            self._settling = True
            # A call of what an object holds, written as one of its methods, is looked up each time.
            soon = self._soon
            soon(self._settle_all)

    def alpha_s(self, source: int, to: int) -> float:
        return self._route(source, to)[1]

    def _find_way(self, source: int, to: int) -> FlowPath:
        if self._ways_kept >= _WAYS_KEPT:
            self._ways.clear()
            self._ways_kept = 0
        numbers, latency_s = self._route(source, to)
        way = FlowPath(tuple(self.sharing.links[number] for number in numbers), latency_s)
        self._ways.setdefault(source, {})[to] = way
        self._ways_kept += 1
        return way

    def _settle(self) -> None:
        """Give new rates, once for all that happens at this instant."""
        self._settling = False
        time = self._time
        now = time.now_s
        found = self.sharing.settle_one(now)
        if found is None:
            for bundle in self.sharing.settle_all(now):
                self._watch(bundle)
        elif found.alone is True:  # to ask for its class would call through C
            flow = found
            # Not `partial`: a call through C deepens the stack that is put aside when a rank resumes.
            time.at(flow.ends_at_s, lambda: self._end_lone(flow))
        elif found.ends_at_s < found.alarm_at_s:  # as `_watch` finds
            self._watch(found)

    def _watch(self, bundle: Bundle) -> None:
        """Look at a bundle when its next flow ends, unless an earlier alarm sets the next."""
        ends_at_s = bundle.ends_at_s
        if ends_at_s < bundle.alarm_at_s:
            bundle.alarm_at_s = ends_at_s
            if bundle.alarm is None:
                bundle.alarm = self._alarm(bundle)
            self._time.at(ends_at_s, bundle.alarm)

    def _alarm(self, bundle: Bundle) -> Action:
        """Return a function that checks a bundle when its next flow may end."""
        time, sharing = self._time, self.sharing

        def look() -> None:
            """End flows, if it is time; else, and if nothing else happens until then, it becomes time."""
            now, ends_at_s = time.now_s, bundle.ends_at_s
            if bundle.alarm_at_s <= now:
                bundle.alarm_at_s = inf
            # Rates have fallen since the alarm was set.
            if ends_at_s > now:
                if ends_at_s >= bundle.alarm_at_s:
                    return
                if not time.pass_to(ends_at_s):
                    bundle.alarm_at_s = ends_at_s
                    time.at(ends_at_s, look)
                    return
                now, bundle.alarm_at_s = ends_at_s, inf
            # Flows that begin or end at one instant get rates once, together.
            flow = None if self._settling else bundle.end_one(now)
            if flow is None:
                self._end_next(bundle, now)
                return
            arrives_at_s = now + flow.way.latency_s
            place = time.last_place() if arrives_at_s > now else None
            if place is None:
                sharing.note_change(bundle)
                self._queue_departure((flow,), now)
                return
            # As in `_depart`, but the bundle has its new rate already.
            self._settling = True
            flow.sent()
            if sharing.starting:
                sharing.note_change(bundle)
                self._settle()
            else:
                self._settling = False
                sharing.rates_computed += 1
                ends_at_s = bundle.ends_at_s
                if ends_at_s < bundle.alarm_at_s:  # as `_watch` finds
                    bundle.alarm_at_s = ends_at_s
                    time.at(ends_at_s, look)
            time.finish(arrives_at_s, place, flow.arrive)

        return look

    def _end_next(self, bundle: Bundle, now: float) -> None:
        """End what is next of a bundle, whatever that changes for others."""
        ended = self.sharing.end_next(bundle, now)
        if not bundle.size:
            bundle.alarm = None  # which holds the bundle
        if self._settling or len(ended) > 1:
            self._queue_departure(ended, now)
        else:
            self._depart(ended[0], now)

    def _end_lone(self, flow: Flow) -> None:
        """End a flow that has shared no link; if it has, look at the bundle that it was put into."""
        bundle = flow.met
        if bundle is not None:
            look = bundle.alarm or self._alarm(bundle)
            bundle.alarm = look
            look()
            return
        self.sharing.end_lone(flow)
        if self._settling:
            self._queue_departure((flow,), self._time.now_s)
        else:
            self._depart(flow, self._time.now_s, alone=True)

    def _depart(self, flow: Flow, now: float, *, alone: bool = False) -> None:
        """Report that the only flow that ends now has left, and later that it has arrived; give new rates to others.

        Args:
            flow: flow that has ended.
            now: the present time.
            alone: whether no other rate changes.
        """
        time = self._time
        arrives_at_s = now + flow.way.latency_s
        place = time.last_place() if arrives_at_s > now else None
        if place is None:
            self._queue_departure((flow,), now)
            return
        # All of it happens as if it had been queued.
        self._settling = True
        flow.sent()
        if alone and not self.sharing.starting:
            self._settling = False
        else:
            self._settle()
        time.finish(arrives_at_s, place, flow.arrive)

    def _queue_departure(self, ended: Sequence[Flow], now: float) -> None:
        """Queue what `_depart` does."""
        time = self._time
        for flow in ended:
            time.soon(flow.sent)
            time.at(now + flow.way.latency_s, flow.arrive)
        if not self._settling:
            self._settling = True
            time.soon(self._settle_all)
