from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork, Route
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime

ALPHA, BANDWIDTH = 0.25, 1024.0  # powers of two, so that times are exact
STEPS = 3


def _star(hosts: int) -> Callable[[int, int], Route]:
    """Every rank has a NIC: link `rank` to send, link `hosts + rank` to receive."""
    return lambda source, to: Route((source, hosts + to), ALPHA)


class _Log:
    """Transfers, and when each has left and arrived."""

    def __init__(self, bandwidths: list[float], route: Callable[[int, int], Route]) -> None:
        self.time = VirtualTime()
        self.network = ContendedNetwork(self.time, bandwidths, route)
        self.left: dict[str, float] = {}
        self.arrived: dict[str, float] = {}

    def transfer(self, name: str, source: int, to: int, nbytes: int, at_s: float = 0.0) -> None:
        def start() -> None:
            self.network.transfer(
                source,
                to,
                nbytes,
                lambda: self.left.update({name: self.time.now()}),
                lambda: self.arrived.update({name: self.time.now()}),
            )

        self.time.at(at_s, start)


def _hosts(count: int) -> _Log:
    return _Log([BANDWIDTH] * 2 * count, _star(count))


def _reference(
    transfers: list[tuple[float, int, int, int]], bandwidths: list[float], ways: Callable[[int, int], Route]
) -> list[float]:
    """Ends of all transfers, everything computed anew at every event and every rate raised by hand."""
    left = [float(nbytes) for _, _, _, nbytes in transfers]
    ends = [-1.0] * len(transfers)
    starts = sorted({start for start, *_ in transfers})
    now = 0.0
    while min(ends) < 0:
        live = [n for n, (start, *_) in enumerate(transfers) if start <= now and ends[n] < 0]
        rates = _filled(live, [ways(source, to).links for _, source, to, _ in transfers], bandwidths)
        upcoming = [start for start in starts if start > now]
        until = min([now + left[n] / rates[n] for n in live] + upcoming)
        for n in live:
            left[n] -= rates[n] * (until - now)
            if left[n] <= 1e-6:
                ends[n] = until
        now = until
    return ends


def _filled(live: list[int], links: list[tuple[int, ...]], bandwidths: list[float]) -> dict[int, float]:
    rates: dict[int, float] = {}
    while len(rates) < len(live):
        shares = {}
        for link, capacity in enumerate(bandwidths):
            rising = [n for n in live if link in links[n] and n not in rates]
            if rising:
                taken = sum(rates[n] for n in live if n in rates and link in links[n])
                shares[link] = (capacity - taken) / len(rising)
        tightest = min(shares, key=lambda link: shares[link])
        for n in live:
            if n not in rates and tightest in links[n]:
                rates[n] = shares[tightest]
    return rates


def _random_transfers(seed: int, hosts: int) -> list[tuple[float, int, int, int]]:
    draw = random.Random(seed)
    return [
        (draw.choice([0.0, 1.0, draw.uniform(0, 5)]), *draw.sample(range(hosts), 2), draw.randint(1, 4000))
        for _ in range(60)
    ]


@pytest.mark.parametrize("seed", range(10))
def test_random_transfers_end_when_a_computation_from_scratch_says(seed: int) -> None:
    hosts = 6
    draw = random.Random(-seed - 1)
    bandwidths = [draw.uniform(500, 2000) for _ in range(2 * hosts + 4)]

    def way(source: int, to: int) -> Route:
        """Three hosts a rack; what leaves a rack crosses its uplink and the other's downlink."""
        racks = (source // 3, to // 3)
        between = () if racks[0] == racks[1] else (2 * hosts + racks[0], 2 * hosts + 2 + racks[1])
        return Route((source, hosts + to, *between), 0.0)

    transfers = _random_transfers(seed, hosts)
    log = _Log(bandwidths, way)
    for number, (start, source, to, nbytes) in enumerate(transfers):
        log.transfer(str(number), source, to, nbytes, at_s=start)
    log.time.run()
    ended = [log.left[str(number)] for number in range(len(transfers))]
    assert ended == pytest.approx(_reference(transfers, bandwidths, way), rel=1e-9)


def test_the_same_transfers_give_the_same_bits() -> None:
    def ends() -> dict[str, float]:
        log = _hosts(6)
        for number, (start, source, to, nbytes) in enumerate(_random_transfers(3, 6)):
            log.transfer(str(number), source, to, nbytes, at_s=start)
        log.time.run()
        return log.arrived

    first, second = ends(), ends()
    assert list(first.items()) == list(second.items())


class _Pushes:
    """Workers that push to all servers, wait for all answers, compute, and push again; `hosts` of several workers."""

    def __init__(self, workers: int, servers: int, per_host: int, per_rack: int | None) -> None:
        self._hosts, self._per_rack = -(-workers // per_host) + servers, per_rack
        self._per_host, self._workers, self._servers = per_host, workers, servers
        racks = [] if per_rack is None else [BANDWIDTH * per_rack / 4] * (2 * (self._hosts // per_rack + 1))
        self.log = _Log([BANDWIDTH] * 2 * self._hosts + racks, self._way)
        self._draw = random.Random(7)
        self._missing = [0] * workers
        self._steps = [STEPS] * workers
        self.begun = 0
        for worker in range(workers):
            self._compute(worker)

    def _host(self, rank: int) -> int:
        """Servers are on the first hosts."""
        return self._servers + rank // self._per_host if rank < self._workers else rank - self._workers

    def _way(self, source: int, to: int) -> Route:
        here, there = self._host(source), self._host(to)
        ends = (here, self._hosts + there)
        if self._per_rack is None or here // self._per_rack == there // self._per_rack:
            return Route(ends, ALPHA)
        up = 2 * self._hosts + here // self._per_rack
        down = 2 * self._hosts + self._hosts // self._per_rack + 1 + there // self._per_rack
        return Route((*ends, up, down), ALPHA)

    def _compute(self, worker: int) -> None:
        """For a third of the time that all pushes take a server, so that the servers are always busy."""
        after = self._draw.expovariate(3 * BANDWIDTH * self._servers / (1024 * self._workers))
        self.log.time.at(self.log.time.now() + after, lambda: self._push(worker))

    def _push(self, worker: int) -> None:
        self._missing[worker] = self._servers
        for server in range(self._workers, self._workers + self._servers):
            self._transfer(worker, server, lambda server=server: self._transfer(server, worker, answered))

        def answered() -> None:
            self._missing[worker] -= 1
            if not self._missing[worker]:
                self._steps[worker] -= 1
                if self._steps[worker]:
                    self._compute(worker)

    def _transfer(self, source: int, to: int, arrived: Callable[[], None]) -> None:
        self.begun += 1
        self.log.network.transfer(source, to, 1024 // self._servers, lambda: None, arrived)

    def costs(self) -> tuple[float, float]:
        """Plays to the end; gives how many rates are computed, and how many flows moved, a transfer."""
        self.log.time.run()
        assert self.begun == 2 * STEPS * self._workers * self._servers
        sharing = self.log.network.sharing
        return sharing.rates_computed / self.begun, sharing.flows_moved / self.begun


@pytest.mark.parametrize(
    ("servers", "per_host", "per_rack"), [(1, 1, None), (4, 1, None), (4, 8, None), (4, 1, 20), (4, 8, 20)]
)
def test_a_transfer_costs_the_same_among_many_as_among_few(
    servers: int, per_host: int, per_rack: int | None
) -> None:
    rates, moves = _Pushes(50, servers, per_host, per_rack).costs()
    rates_of_many, moves_of_many = _Pushes(800, servers, per_host, per_rack).costs()
    assert rates_of_many <= 1.5 * rates
    assert moves_of_many <= 1.5 * moves


@pytest.mark.parametrize("seed", range(3))
def test_flows_of_any_size_into_a_full_nic_end_when_a_computation_from_scratch_says(seed: int) -> None:
    hosts = 20
    draw = random.Random(seed)
    sizes = [1024, 1024, 1024, 1, 3000]  # most come in the order in which they end
    transfers = [(draw.uniform(0, 14), source, 0, draw.choice(sizes)) for source in range(1, hosts)]
    transfers += [(30.0 + start, source, 0, nbytes) for start, source, _, nbytes in transfers]
    log = _hosts(hosts)
    for number, (start, source, to, nbytes) in enumerate(transfers):
        log.transfer(str(number), source, to, nbytes, at_s=start)
    log.time.run()
    ended = [log.left[str(number)] for number in range(len(transfers))]
    assert ended == pytest.approx(_reference(transfers, [BANDWIDTH] * 2 * hosts, _star(hosts)), rel=1e-9)
    assert log.network.sharing.rates_computed <= 2.5 * len(transfers)  # one at the beginning, one at the end
