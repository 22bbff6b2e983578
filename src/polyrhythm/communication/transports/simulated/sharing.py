"""How flows share links: max–min fair rates, kept up to date while flows begin and end.

What a change costs. Flows that cross the same coupling links (`Coupling`) are one bundle, and a change touches only
the bundles that are connected with it through coupling links (`Component`). A thousand workers that push to four
servers, whose NICs are full while the workers' are not, are four bundles of a thousand flows, which know nothing of
each other: O(log n) a flow. What begins or ends at the same instant is computed together, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from polyrhythm.communication.transports.simulated.bundle import Bundle, Flow, Link
from polyrhythm.communication.transports.simulated.component import Component
from polyrhythm.communication.transports.simulated.coupling import Coupling


class Sharing:
    """All flows, in bundles, and their rates.

    Changes are collected by `begin` and `end_next`; `settle` gives the rates that follow from them.

    Args:
        bandwidths: of the links, one direction each, in bytes/s.

    Attributes:
        links: in order.
        rates_computed: how often the rate of a bundle has been computed so far.
    """

    def __init__(self, bandwidths: Sequence[float]) -> None:
        self.links = [Link(number, bandwidth) for number, bandwidth in enumerate(bandwidths)]
        self.rates_computed = 0
        self._coupling = Coupling()
        self._starting: list[Flow] = []
        self._now_s = 0.0

    @property
    def flows_moved(self) -> int:
        """How often a flow has come to another bundle than its first so far."""
        return self._coupling.flows_moved

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
                    self._coupling.couple(link, False, now_s)
        bundle.ends_at_s = inf  # what was planned holds no more, even for this instant
        self._coupling.changed[bundle] = None
        return ended

    def settle(self, now_s: float) -> Iterable[Bundle]:
        """Gives new rates to whatever is connected with what has changed.

        Returns:
            The bundles whose next end is another than before.
        """
        self._now_s = now_s
        starting, coupling = self._starting, self._coupling
        changed = coupling.changed
        if starting:
            if len(starting) == 1 and not changed:
                bundle = self._find_again(starting[0])
                if bundle is not None:
                    starting.clear()
                    return (bundle,)
            coupling.take_in(starting, now_s)
            starting.clear()
        for bundle in changed:
            if not bundle.size:
                if not self._let_go(bundle):
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

    def _let_go(self, bundle: Bundle) -> bool:
        """Forgets a bundle without flows; says no where others share a coupling link with it, which get more now."""
        for link in bundle.links:
            if link.bundles:
                return False
        self._coupling.forget(bundle)
        return True

    def _settle_together(self, *, refilled: bool) -> dict[Bundle, None]:
        """Settles bundles that share links, and links that turn out to be full; gives all bundles that it touches.

        Args:
            refilled: whether what has changed has its new rates, and only links are left.
        """
        coupling, now_s = self._coupling, self._now_s
        touched: dict[Bundle, None] = {}
        loosened = False
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
        """Gives new rates to bundles that share no coupling link; gives the others, as they are connected."""
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
        """Gives the rate that `fair_rates` would give to a single bundle."""
        self.rates_computed += 1
        rate = bundle.limit
        for link in bundle.links:
            rate = min(rate, link.bandwidth / bundle.size)
        return self._give(bundle, rate)

    def _fill(self, component: Component) -> list[Bundle]:
        """Gives new rates to the bundles of a component; gives those whose rates are others than before."""
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
