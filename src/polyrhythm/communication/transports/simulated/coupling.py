"""Which links are asked when rates are computed, and which flows are one bundle therefore.

    loose       a link with room left: it stops nobody and is left out of the computation
    coupling    a link that may be full: the bundles that cross it get their rates together

Rates that are max–min fair on the coupling links alone are so on all links, as long as no loose link carries more
than it can. So a loose link, when it is looked at, divides the room that it has among its bundles: each may rise by
the same factor. It is looked at again only when a flow comes to it, or when a bundle rises above what it was
allowed; if then it carries too much, it couples. A coupling link becomes loose again when it has had room during as
many changes as it has flows, so that moving them is paid for.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from polyrhythm.communication.transports.simulated.bundle import Bundle, Flow, Link

ROUNDING = 1e-12
"""By how much more than its bandwidth a link may seem to carry because sums are rounded, relatively."""
ROOMY = 0.9
"""A coupling link has room when it carries no more than this share of its bandwidth."""


class Coupling:
    """Every flow, in the bundle of the coupling links that it crosses.

    Attributes:
        changed: bundles that flows have come to or left, and whose rates have not been looked at since.
        suspects: loose links that may carry too much.
        flows_moved: how often a flow has come to another bundle than its first so far.
    """

    def __init__(self) -> None:
        self.changed: dict[Bundle, None] = {}
        self.suspects: dict[Link, None] = {}
        self.flows_moved = 0
        self._bundles: dict[tuple[tuple[Link, ...], float], Bundle] = {}

    def take_in(self, flows: Iterable[Flow], now_s: float) -> None:
        """Finds the bundles of new flows, which their links know already."""
        for flow in flows:
            for link in flow.way.links:
                if not link.coupling and len(link.flows) > 1:
                    self._foresee(flow, now_s)
                    break
        for flow in flows:
            self._put(flow, now_s)

    def forget(self, bundle: Bundle) -> None:
        """Forgets a bundle without flows."""
        self._bundles.pop((bundle.links, bundle.limit), None)

    def suspect(self, bundle: Bundle) -> None:
        """Has the loose links looked at that had room for less than the present rate of a bundle."""
        for link in bundle.outgrown():
            self.suspects[link] = None

    def couple_overloaded(self, now_s: float) -> None:
        """Looks at suspects: couples those that carry too much, and divides the room of the others."""
        suspects, self.suspects = self.suspects, {}
        overloaded = []
        for link in suspects:
            if link.coupling or len(link.flows) < 2:  # a single flow has the link's bandwidth as its limit
                continue
            room = link.bandwidth / link.load()
            if room < 1 - ROUNDING:
                overloaded.append(link)
            else:
                for bundle in link.bundles:
                    bundle.allow(link, bundle.rate * max(1.0, room))
        for link in overloaded:  # only now, since what moves has no rate yet
            self.couple(link, True, now_s)

    def loosen(self, links: Iterable[Link], now_s: float) -> None:
        """Leaves out, of links that got new rates, those that have had room for long."""
        roomy = []
        for link in links:
            link.roomy = link.roomy + 1 if link.load() <= ROOMY * link.bandwidth else 0
            if link.roomy >= len(link.flows):
                roomy.append(link)
        for link in roomy:
            self.couple(link, False, now_s)

    def couple(self, link: Link, coupling: bool, now_s: float) -> None:
        """Has a link asked from now on, or no more, and moves its flows to the bundles that they belong to then."""
        link.coupling, link.roomy = coupling, 0
        for flow in list(link.flows):
            if flow.bundle is not None:
                self.flows_moved += 1
                self._take(flow.bundle, flow, now_s)
                self._put(flow, now_s)

    def _foresee(self, flow: Flow, now_s: float) -> None:
        """Couples the link that will stop a new flow if that is plain to see; whatever is missed is found later."""
        tightest, least = flow.way.links[0], inf
        for link in flow.way.links:
            share = link.bandwidth / len(link.flows)
            if share < least or (share == least and link.coupling):
                tightest, least = link, share
        if tightest.coupling or len(tightest.flows) == 1:
            return
        older = 0
        for other in tightest.flows:  # in the order of arrival: the new ones come last
            if other.bundle is not None:
                older += 1
                if older == 2:
                    return
            else:
                break
        self.couple(tightest, True, now_s)

    def _put(self, flow: Flow, now_s: float) -> None:
        """Puts a flow into the bundle of the coupling links that it crosses."""
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
        bundle = self._bundles.get(key)
        if bundle is None:
            bundle = Bundle(*key)
            if coupling:  # a flow that shares nothing is alone: its count starts at 0, and its time is exact
                self._bundles[key] = bundle
        if coupling:
            flow.way.bundle, flow.way.loose = bundle, loose
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
