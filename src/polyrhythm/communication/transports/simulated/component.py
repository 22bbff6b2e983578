"""Bundles that get their rates together, since they share coupling links, directly or through others."""

from __future__ import annotations

from typing import NamedTuple

from polyrhythm.communication.transports.simulated.bundle import Bundle, Link
from polyrhythm.communication.transports.simulated.fair_shares import Demand, fair_rates


class Component(NamedTuple):
    """Bundles that share coupling links with each other only.

    Attributes:
        bundles: in the order in which they were found.
        bandwidths: of all links that couple them, in the order in which the bundles cross them, in bytes/s.
    """

    bundles: list[Bundle]
    bandwidths: dict[Link, float]

    @classmethod
    def of(cls, bundle: Bundle) -> Component:
        """Finds the component of a bundle."""
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
        """Gives the rates of a flow of each bundle, in bytes/s, by the place of the bundle."""
        demands = [Demand(bundle.links, bundle.size, bundle.limit) for bundle in self.bundles]
        return fair_rates(self.bandwidths, dict(enumerate(demands)))
