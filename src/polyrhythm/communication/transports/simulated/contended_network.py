"""Links that transfers share fairly: α–β with max–min contention.

    alone       M bytes take  α + M / (the smallest bandwidth on the way)
    together    every link is shared max–min fairly; rates change whenever a transfer begins or ends

What a change costs. A link that only one flow crosses is no more than a limit of that flow's rate, and flows that
cross the same contended links are one bundle. Beginning or ending touches the flow's own links and the bundles that
are connected with them through contended links; all others keep their rates and plans. A thousand workers that push
to one server are one bundle of a thousand flows: O(log n) an event. Where all talk to all, there are as many bundles
as pairs; then what begins or ends at the same instant is computed together, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from polyrhythm.communication.transports.simulated.bundle import Bundle, Flow
from polyrhythm.communication.transports.simulated.fair_shares import Demand, fair_rates
from polyrhythm.communication.transports.simulated.network import Action
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime

Key = tuple[tuple[int, ...], float, int]
"""Of a bundle: its contended links, its limit, and, where it has no such links, a number of its own."""


@dataclass(frozen=True)
class Route:
    """The way of a message.

    Attributes:
        links: numbers of the links that it crosses, at least one, each once.
        latency_s: α of the whole way.
    """

    links: tuple[int, ...]
    latency_s: float


class ContendedNetwork:
    """A network whose links are shared by all that cross them; implements `Network`.

    Args:
        time: the simulation's.
        bandwidths: of the links, one direction each, in bytes/s.
        route: gives the way from one global rank to another.
    """

    def __init__(
        self, time: VirtualTime, bandwidths: Sequence[float], route: Callable[[int, int], Route]
    ) -> None:
        self._time = time
        self._bandwidths = bandwidths
        self._route = route
        self._crossing: dict[int, dict[Flow, None]] = {}  # in the order of arrival
        self._bundles: dict[Key, Bundle] = {}
        self._bundles_on: dict[int, dict[Bundle, None]] = {}  # of contended links only
        self._changed_links: dict[int, None] = {}
        self._changed_bundles: dict[Bundle, None] = {}
        self._settling = False
        self._made = 0

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        """Starts a transfer now; see `Network.transfer`."""
        route = self._route(source, to)
        flow = Flow(route.links, route.latency_s, sent, arrived, float(nbytes))
        for link in flow.links:
            on_it = self._crossing.setdefault(link, {})
            on_it[flow] = None
            if len(on_it) == 2:  # the link becomes contended, which its first flow must learn
                self._rebundle(next(iter(on_it)))
        self._put(flow)

    def _rebundle(self, flow: Flow) -> None:
        if flow.bundle is not None:
            self._take(flow.bundle, flow)
            self._put(flow)

    def _put(self, flow: Flow) -> None:
        """Finds the bundle of a flow by the links that others cross too."""
        contended = tuple(link for link in flow.links if len(self._crossing[link]) > 1)
        limit = min((self._bandwidths[link] for link in flow.links if link not in contended), default=inf)
        if contended and limit >= min(self._bandwidths[link] for link in contended):
            limit = inf  # what others cross stops it earlier
        # A flow that shares nothing is a bundle alone: its count starts at 0, and its time is exact.
        key = (contended, limit, 0 if contended else self._made + 1)
        bundle = self._bundles.get(key)
        if bundle is None:
            self._made += 1
            bundle = self._bundles[key] = Bundle(self._made, contended, limit)
            for link in contended:
                self._bundles_on.setdefault(link, {})[bundle] = None
        bundle.pass_to(self._time.now())
        bundle.join(flow)
        self._note_change(bundle)

    def _take(self, bundle: Bundle, flow: Flow) -> None:
        bundle.pass_to(self._time.now())
        bundle.leave(flow)
        self._note_change(bundle)

    def _note_change(self, bundle: Bundle) -> None:
        bundle.alarm += 1  # what was planned holds no more, even for this instant
        self._changed_bundles[bundle] = None
        self._changed_links.update(dict.fromkeys(bundle.links))
        if not self._settling:  # once for all that happens at this instant
            self._settling = True
            self._time.at(self._time.now(), self._settle)

    def _settle(self) -> None:
        """Gives new rates to whatever is connected with what has changed."""
        self._settling = False
        links, changed = self._changed_links, self._changed_bundles
        self._changed_links, self._changed_bundles = {}, {}
        for bundle in changed:
            if not bundle.size:
                del self._bundles[bundle.links, bundle.limit, 0 if bundle.links else bundle.number]
                for link in bundle.links:
                    del self._bundles_on[link][bundle]
        touched = self._connected(links, [bundle for bundle in changed if bundle.size])
        demands = {number: Demand(made.links, made.size, made.limit) for number, made in touched.items()}
        capacities = {link: self._bandwidths[link] for made in touched.values() for link in made.links}
        for number, rate in fair_rates(capacities, demands).items():
            bundle = touched[number]
            if rate != bundle.rate or bundle in changed:
                bundle.pass_to(self._time.now())
                bundle.rate = rate
                self._plan(bundle)

    def _connected(self, links: dict[int, None], bundles: list[Bundle]) -> dict[int, Bundle]:
        """Gives all bundles that share contended links with these, directly or through others."""
        found = {bundle.number: bundle for bundle in bundles}
        seen, todo = set(links), list(links)
        while todo:
            for bundle in self._bundles_on.get(todo.pop(), ()):
                if bundle.number not in found:
                    found[bundle.number] = bundle
                fresh = [link for link in bundle.links if link not in seen]
                seen.update(fresh)
                todo += fresh
        return found

    def _plan(self, bundle: Bundle) -> None:
        bundle.alarm += 1
        alarm = bundle.alarm

        def end() -> None:
            if bundle.alarm == alarm:  # else the plan has changed since
                self._end(bundle)

        self._time.at(bundle.next_end_s(), end)

    def _end(self, bundle: Bundle) -> None:
        now = self._time.now()
        for flow in bundle.end_next(now):
            for link in flow.links:
                on_it = self._crossing[link]
                del on_it[flow]
                if len(on_it) == 1:  # no longer contended
                    self._rebundle(next(iter(on_it)))
            self._time.at(now, flow.sent)
            self._time.at(now + flow.latency_s, flow.arrived)
        self._note_change(bundle)
