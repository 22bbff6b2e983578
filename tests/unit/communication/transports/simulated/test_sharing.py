from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

import pytest

from polyrhythm.communication.transports.simulated.contended_network import (
    Bundle,
    CalledFlow,
    Flow,
    FlowPath,
    Sharing,
)


def _nothing() -> None:
    """Nobody waits for these flows."""


class _Play:
    """Flows that begin when they are told and end when their bundle says; `now_s` goes on by itself."""

    def __init__(self, bandwidths: list[float]) -> None:
        self.sharing = Sharing(bandwidths)
        self.live: dict[Flow, tuple[int, ...]] = {}
        self.now_s = 0.0
        self._bundles: dict[Bundle | Flow, None] = {}
        self._ways: dict[tuple[int, ...], FlowPath] = {}

    def begin(self, *ways: tuple[int, ...], nbytes: float = 1e9) -> list[Flow]:
        flows = []
        for numbers in ways:
            links = tuple(self.sharing.links[number] for number in numbers)
            way = self._ways.setdefault(numbers, FlowPath(links, 0.0))
            flow = CalledFlow(_nothing, _nothing, nbytes)
            flow.way = way
            self.sharing.begin(flow)
            self.live[flow] = numbers
            flows.append(flow)
        return flows

    def settle(self) -> None:
        for bundle in self.sharing.settle(self.now_s):
            self._bundles[bundle] = None
        self._bundles = {bundle: None for bundle in self._bundles if bundle.ends_at_s < inf}

    def end_next(self) -> None:
        """Goes on to the next end, of one flow or of several."""
        bundle = min(self._bundles, key=lambda bundle: bundle.ends_at_s)
        self.now_s = bundle.ends_at_s
        if isinstance(bundle, Flow):  # it has met nobody
            del self._bundles[bundle], self.live[bundle]
            self.sharing.end_lone(bundle)
            return
        for flow in self.sharing.end_next(bundle, self.now_s):
            del self.live[flow]

    def rates(self) -> list[float]:
        return [(flow.bundle or flow).rate for flow in self.live]

    def coupling(self) -> list[int]:
        return [link.number for link in self.sharing.links if link.coupling]


def _fair(ways: list[tuple[int, ...]], bandwidths: list[float]) -> list[float]:
    """Max-min fair rates by hand, flow by flow, all links asked every time."""
    rates = [-1.0] * len(ways)
    while -1.0 in rates:
        shares = {}
        for link in {link for way, rate in zip(ways, rates, strict=True) if rate < 0 for link in way}:
            across = [rate for way, rate in zip(ways, rates, strict=True) if link in way]
            left = bandwidths[link] - sum(rate for rate in across if rate >= 0)
            shares[link] = left / sum(rate < 0 for rate in across)
        tightest = min(shares, key=lambda link: (shares[link], link))
        rates = [
            shares[tightest] if rate < 0 and tightest in way else rate
            for way, rate in zip(ways, rates, strict=True)
        ]
    return rates


def _check(play: _Play, bandwidths: list[float]) -> None:
    assert play.rates() == pytest.approx(_fair(list(play.live.values()), bandwidths), rel=1e-9)


def _racks_of_hosts(
    draw: random.Random, hosts: int, per_rack: int
) -> tuple[list[float], list[list[tuple[int, ...]]]]:
    """Links of hosts with NICs of three speeds in racks, and the way from every host to every other."""
    racks = -(-hosts // per_rack)
    nics = [draw.choice([500.0, 1000.0, 4000.0]) for _ in range(2 * hosts)]
    uplinks = [draw.uniform(500, 1000 * per_rack) for _ in range(2 * racks)]
    ways = []
    for here in range(hosts):
        ways.append([])
        for there in range(hosts):
            up, down = here // per_rack, there // per_rack
            between = () if up == down else (2 * hosts + up, 2 * hosts + racks + down)
            ways[here].append((here, hosts + there, *between))
    return nics + uplinks, ways


def _pairs(draw: random.Random, hosts: int) -> Iterator[list[tuple[int, int]]]:
    """What begins at one instant: a push to all servers, an answer, a burst, or whatever."""
    servers = hosts // 4
    while True:
        worker, server = draw.randrange(servers, hosts), draw.randrange(servers)
        yield [(worker, to) for to in range(servers)]
        yield [(server, worker)]
        yield [(draw.randrange(servers, hosts), server) for _ in range(draw.randint(1, hosts))]
        yield [tuple(draw.sample(range(hosts), 2)) for _ in range(draw.randint(1, 4))]


@pytest.mark.parametrize("seed", range(25))
def test_rates_are_those_of_all_links_whatever_couples(seed: int) -> None:
    draw = random.Random(seed)
    hosts = draw.choice([6, 9, 16])
    bandwidths, ways = _racks_of_hosts(draw, hosts, draw.choice([3, 4]))
    play, pairs = _Play(bandwidths), _pairs(draw, hosts)
    changed, before = 0, []
    for _ in range(80):
        if play.live and (len(play.live) > 60 or draw.random() < 0.6):
            play.end_next()
        else:
            play.begin(
                *[ways[a][b] for a, b in next(pairs) if a != b], nbytes=draw.choice([100.0, 1000.0, 5000.0])
            )
        play.settle()
        _check(play, bandwidths)
        changed += play.coupling() != before
        before = play.coupling()
    assert changed > 10  # links did go from loose to coupling and back


def test_a_flow_alone_ends_to_the_bit() -> None:
    play = _Play([3.0, 7.0])
    play.begin((0, 1), nbytes=10.0)
    play.settle()
    play.end_next()
    assert play.now_s == 10.0 / 3.0
    assert not play.live
