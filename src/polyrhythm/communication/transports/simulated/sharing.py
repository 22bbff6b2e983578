"""How flows share links: max–min fair rates, kept up to date while flows begin and end.

    loose       a link with room left: it stops nobody and is left out of the computation
    coupling    a link that may be full: the bundles that cross it get their rates together

Rates that are max–min fair on the coupling links alone are so on all links, as long as no loose link carries more
than it can. So a loose link, when it is looked at, divides the room that it has among its bundles: each may rise by
the same factor. It is looked at again only when a flow comes to it, or when a bundle rises above what it was
allowed; if then it carries too much, it couples. A coupling link becomes loose again when it has had room during as
many changes as it has flows, so that moving them is paid for.

What a change costs. Flows that cross the same coupling links are one bundle, and a change touches only the bundles
that are connected with it through coupling links. A thousand workers that push to four servers, whose NICs are full
while the workers' are not, are four bundles of a thousand flows, which know nothing of each other: O(log n) a flow.
What begins or ends at the same instant is computed together, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from polyrhythm.communication.transports.simulated.bundle import Bundle, Flow, Link
from polyrhythm.communication.transports.simulated.fair_shares import Demand, fair_rates

ROUNDING = 1e-12
"""By how much more than its bandwidth a link may seem to carry because sums are rounded, relatively."""
ROOMY = 0.9
"""A coupling link has room when it carries no more than this share of its bandwidth."""


class Sharing:
    """All flows, in bundles, and their rates.

    Changes are collected by `begin` and `end_next`; `settle` gives the rates that follow from them.

    Args:
        bandwidths: of the links, one direction each, in bytes/s.

    Attributes:
        links: in order.
        rates_computed: how often the rate of a bundle has been computed so far.
        flows_moved: how often a flow has come to another bundle than its first so far.
    """

    def __init__(self, bandwidths: Sequence[float]) -> None:
        self.links = [Link(number, bandwidth) for number, bandwidth in enumerate(bandwidths)]
        self.rates_computed = 0
        self.flows_moved = 0
        self._bundles: dict[tuple[tuple[Link, ...], float], Bundle] = {}
        self._starting: list[Flow] = []
        self._changed: dict[Bundle, None] = {}
        self._suspects: dict[Link, None] = {}  # loose links that may carry too much
        self._now_s = 0.0

    def begin(self, flow: Flow) -> None:
        """Takes in a new flow."""
        for link in flow.way.links:
            link.flows[flow] = None
        self._starting.append(flow)

    def end_next(self, bundle: Bundle, now_s: float) -> list[Flow]:
        """Ends the flow of a bundle that is next, and all that end with it; called when its time has come."""
        self._now_s = now_s
        ended, coupled = bundle.end_next(now_s), bundle.links
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
                    self._couple(link, False)
        bundle.ends_at_s = inf  # what was planned holds no more, even for this instant
        self._changed[bundle] = None
        return ended

    def settle(self, now_s: float) -> Iterable[Bundle]:
        """Gives new rates to whatever is connected with what has changed.

        Returns:
            The bundles whose next end is another than before.
        """
        self._now_s = now_s
        starting, changed = self._starting, self._changed
        if starting:
            if len(starting) == 1 and not changed:
                bundle = self._find_again(starting[0])
                if bundle is not None:
                    starting.clear()
                    return (bundle,)
            self._take_in()
            starting.clear()
        for bundle in changed:
            if not bundle.size:
                if not self._let_go(bundle):
                    break
            elif bundle.refill():
                self.rates_computed += 1
                if bundle.allowed:
                    self._suspect(bundle)
            else:
                break
        else:  # none shares a coupling link with others
            if not self._suspects:
                self._changed = {}
                return changed
            return self._planned(refilled=True)
        return self._planned(refilled=False)

    def _planned(self, *, refilled: bool) -> dict[Bundle, None]:
        """Does what `_settle_together` does, and finds out when the next flows end."""
        touched = self._settle_together(refilled=refilled)
        for bundle in touched:
            bundle.plan()
        return touched

    def _find_again(self, flow: Flow) -> Bundle | None:
        """Puts a new flow into the bundle of the last one on its way, and gives it its rate, if that is all to be done.

        Returns:
            The bundle; None, and nothing has been done, where the flow shares a loose link, or the bundle a coupling
            one.
        """
        way = flow.way
        bundle, loose = way.bundle, way.loose
        if bundle is None or not bundle.size:  # a coupling link that has become loose has lost its bundles
            return None
        for link in loose:
            if len(link.flows) > 1 or link.coupling:
                return None
        if not bundle.admit(flow, self._now_s):
            return None
        for link in loose:
            link.bundles[bundle] = 1
        self.rates_computed += 1
        return bundle

    def _take_in(self) -> None:
        """Finds the bundles of new flows."""
        for flow in self._starting:
            for link in flow.way.links:
                if not link.coupling and len(link.flows) > 1:
                    self._foresee(flow)
                    break
        for flow in self._starting:
            self._put(flow)

    def _let_go(self, bundle: Bundle) -> bool:
        """Forgets a bundle without flows; says no where others share a coupling link with it, which get more now."""
        for link in bundle.links:
            if link.bundles:
                return False
        self._bundles.pop((bundle.links, bundle.limit), None)
        return True

    def _settle_together(self, *, refilled: bool) -> dict[Bundle, None]:
        """Settles bundles that share links, and links that turn out to be full; gives all bundles that it touches.

        Args:
            refilled: whether what has changed has its new rates, and only links are left.
        """
        touched: dict[Bundle, None] = {}
        loosened = False
        while self._changed:
            changed, self._changed = self._changed, {}
            touched.update(changed)
            components = [] if refilled else self._components(changed, touched)
            refilled = False
            for component in components:
                for bundle in self._fill(component):
                    touched[bundle] = None
            if self._suspects:
                self._couple_overloaded()
            if components and not self._changed and not loosened:
                loosened = True  # once is enough: the rates are the same afterwards
                self._loosen(components)
        return touched

    def _foresee(self, flow: Flow) -> None:
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
        self._couple(tightest, True)

    def _couple(self, link: Link, coupling: bool) -> None:
        link.coupling, link.roomy = coupling, 0
        for flow in list(link.flows):
            if flow.bundle is not None:
                self.flows_moved += 1
                self._take(flow.bundle, flow)
                self._put(flow)

    def _put(self, flow: Flow) -> None:
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
                self._suspects[link] = None
        key = coupling, limit if limit < room else inf
        bundle = self._bundles.get(key)
        if bundle is None:
            bundle = Bundle(*key)
            if coupling:  # a flow that shares nothing is alone: its count starts at 0, and its time is exact
                self._bundles[key] = bundle
        if coupling:
            flow.way.bundle, flow.way.loose = bundle, loose
        bundle.join(flow, self._now_s)
        for link in loose:
            bundles = link.bundles
            bundles[bundle] = bundles.get(bundle, 0) + 1
        if bundle.size == 1:
            for link in coupling:
                link.bundles[bundle] = 1
        bundle.ends_at_s = inf
        self._changed[bundle] = None

    def _take(self, bundle: Bundle, flow: Flow) -> None:
        bundle.leave(flow, self._now_s)
        for link in flow.way.links:
            if link not in bundle.links:
                link.cross_less(bundle)
            elif not bundle.size:
                del link.bundles[bundle]
        bundle.ends_at_s = inf
        self._changed[bundle] = None

    def _components(self, changed: Iterable[Bundle], touched: dict[Bundle, None]) -> list[list[Bundle]]:
        """Gives new rates to bundles that share no coupling link; gives the others, as they are connected."""
        components = []
        found: set[Bundle] = set()
        for bundle in changed:
            seeds: Iterable[Bundle] = (bundle,)
            if not bundle.size:
                self._bundles.pop((bundle.links, bundle.limit), None)
                seeds = [seed for link in bundle.links if link.coupling for seed in link.bundles]
            for seed in seeds:
                if seed in found:
                    continue
                component = _connected(seed)
                found.update(component)
                if len(component) > 1:
                    components.append(component)
                elif self._fill_alone(seed):
                    touched[seed] = None
        return components

    def _fill_alone(self, bundle: Bundle) -> bool:
        """Gives the rate that `fair_rates` would give to a single bundle."""
        self.rates_computed += 1
        rate = bundle.limit
        for link in bundle.links:
            rate = min(rate, link.bandwidth / bundle.size)
        return self._give(bundle, rate)

    def _fill(self, component: list[Bundle]) -> list[Bundle]:
        """Gives new rates to bundles that share coupling links with each other only; gives those that changed."""
        self.rates_computed += len(component)
        demands = {
            number: Demand(bundle.links, bundle.size, bundle.limit) for number, bundle in enumerate(component)
        }
        capacities = {link: link.bandwidth for bundle in component for link in bundle.links}
        rates = fair_rates(capacities, demands)
        return [bundle for number, bundle in enumerate(component) if self._give(bundle, rates[number])]

    def _give(self, bundle: Bundle, rate: float) -> bool:
        if rate == bundle.rate:
            return False
        bundle.change_rate(rate, self._now_s)
        if bundle.allowed:
            self._suspect(bundle)
        return True

    def _suspect(self, bundle: Bundle) -> None:
        """Has the loose links looked at that had room for less than the present rate of a bundle."""
        for link in bundle.outgrown():
            self._suspects[link] = None

    def _couple_overloaded(self) -> None:
        suspects, self._suspects = self._suspects, {}
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
            self._couple(link, True)

    def _loosen(self, components: list[list[Bundle]]) -> None:
        """Leaves out links that have had room for long; those that only one bundle crosses do no harm."""
        links = dict.fromkeys(
            [link for component in components for bundle in component for link in bundle.links]
        )
        for link in links:
            link.roomy = link.roomy + 1 if link.load() <= ROOMY * link.bandwidth else 0
        for link in [link for link in links if link.roomy >= len(link.flows)]:
            self._couple(link, False)


def _connected(bundle: Bundle) -> list[Bundle]:
    """Gives all bundles that share coupling links with one, directly or through others."""
    for link in bundle.links:
        if len(link.bundles) > 1:
            break
    else:
        return [bundle]
    found = {bundle: None}
    todo = list(bundle.links)
    seen = set(todo)
    while todo:
        for other in todo.pop().bundles:
            if other not in found:
                found[other] = None
                for link in other.links:
                    if link not in seen:
                        seen.add(link)
                        todo.append(link)
    return list(found)
