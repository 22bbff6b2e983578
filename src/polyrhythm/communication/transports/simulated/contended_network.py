"""Links that transfers share fairly: α–β with max–min contention.

    alone       M bytes take  α + M / (the smallest bandwidth on the way)
    together    every link is shared max–min fairly; rates change whenever a transfer begins or ends

Who gets how much is the matter of `Sharing`; here it becomes times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from polyrhythm.communication.transports.simulated.bundle import Bundle, Flow, Way
from polyrhythm.communication.transports.simulated.network import Action
from polyrhythm.communication.transports.simulated.sharing import Sharing
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime

_WAYS_KEPT = 1 << 16


class Route(NamedTuple):
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

    Attributes:
        sharing: of the links.
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
        self._ways: dict[int, dict[int, Way]] = {}  # by source and receiver; most go again and again
        self._ways_kept = 0

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        """Starts a transfer now; see `Network.transfer`."""
        ways = self._ways.get(source)
        way = None if ways is None else ways.get(to)
        if way is None:
            way = self._find_way(source, to)
        self.sharing.begin(Flow(way, sent, arrived, nbytes))
        if not self._settling:
            self._settling = True
            # A call of what an object holds, written as one of its methods, is looked up anew.
            soon = self._soon
            soon(self._settle_all)

    def alpha_s(self, source: int, to: int) -> float:
        """Gives α of the way from one global rank to another."""
        return self._route(source, to)[1]

    def _find_way(self, source: int, to: int) -> Way:
        if self._ways_kept >= _WAYS_KEPT:
            self._ways.clear()
            self._ways_kept = 0
        numbers, latency_s = self._route(source, to)
        way = Way(tuple(self.sharing.links[number] for number in numbers), latency_s)
        self._ways.setdefault(source, {})[to] = way
        self._ways_kept += 1
        return way

    def _settle(self) -> None:
        """Gives new rates, once for all that happens at this instant."""
        self._settling = False
        for bundle in self.sharing.settle(self._time.now_s):
            ends_at_s = bundle.ends_at_s
            if ends_at_s < bundle.alarm_at_s:  # else the alarm that is set comes first, and sets the next
                bundle.alarm_at_s = ends_at_s
                if bundle.alarm is None:
                    bundle.alarm = partial(self._look_at, bundle)
                self._time.at(ends_at_s, bundle.alarm)

    def _look_at(self, bundle: Bundle) -> None:
        """Ends flows, if it is time; else, and if nothing else happens until then, it becomes time."""
        time = self._time
        now, ends_at_s = time.now_s, bundle.ends_at_s
        if bundle.alarm_at_s <= now:
            bundle.alarm_at_s = inf
        if ends_at_s > now:
            if ends_at_s >= bundle.alarm_at_s:
                return
            if not time.pass_to(ends_at_s):
                assert bundle.alarm is not None
                bundle.alarm_at_s = ends_at_s
                time.at(ends_at_s, bundle.alarm)
                return
            now, bundle.alarm_at_s = ends_at_s, inf
        ended = self.sharing.end_next(bundle, now)
        if not bundle.size:
            bundle.alarm = None  # which holds the bundle
        flow = ended[0]
        arrives_at_s = now + flow.way.latency_s
        place = None if self._settling or len(ended) > 1 or arrives_at_s <= now else time.last_place()
        if place is not None:  # all of it happens as if it had been queued
            self._settling = True
            sent = flow.sent
            sent()
            self._settle()
            time.finish(arrives_at_s, place, flow.arrived)
            return
        for flow in ended:
            time.soon(flow.sent)
            time.at(now + flow.way.latency_s, flow.arrived)
        if not self._settling:
            self._settling = True
            time.soon(self._settle)
