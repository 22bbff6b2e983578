"""The links of a cluster, numbered, and the way of a message over them.

host ──out──▶ (rack ──up──▶ ──down──▶ rack) ──in──▶ host        inside a host: one link that all its ranks share

A server that reads and writes slower than its host's NIC has a link of its own in each direction besides.
"""

from __future__ import annotations

from polyrhythm.communication.transports.simulated.contended_network import Route
from polyrhythm.simulation.cluster import Cluster, Link
from polyrhythm.simulation.layout import Layout


class Wiring:
    """The links between the ranks of a layout.

    Args:
        layout: which rank is where.

    Attributes:
        bandwidths: of all links, in bytes/s; first every host's sending NIC, then every receiving one, then the
            insides of hosts, then every rack's uplink and every rack's downlink, then every server's sending and
            every server's receiving, where the cluster limits them.
    """

    def __init__(self, layout: Layout) -> None:
        cluster = layout.cluster
        self._host_of = layout.host_of
        self._hosts = len(cluster.machines)
        self._racks = cluster.racks
        nics = [machine.nic or cluster.nic for machine in cluster.machines]
        insides = [machine.inside or cluster.inside for machine in cluster.machines]
        self._nic_latency_s = [nic.latency_s for nic in nics]
        self._inside_latency_s = [inside.latency_s for inside in insides]
        speeds = [link.bandwidth_bytes_per_s for link in (*nics, *nics, *insides)]
        uplinks = _uplinks(cluster, nics)
        self._rack_count = len(uplinks)
        self.bandwidths = [*speeds, *uplinks, *uplinks]
        self._sending: dict[int, tuple[int, ...]] = {}
        self._receiving: dict[int, tuple[int, ...]] = {}
        if cluster.server_bandwidth_bytes_per_s is not None:
            self._limit_servers(layout.cast.servers, cluster.server_bandwidth_bytes_per_s)

    def route(self, source: int, to: int) -> Route:
        """Gives the way from one rank to another."""
        here, there = self._host_of[source], self._host_of[to]
        if here == there:
            return Route((2 * self._hosts + here,), self._inside_latency_s[here])
        latency_s = max(self._nic_latency_s[here], self._nic_latency_s[there])
        ends = (here, self._hosts + there, *self._sending.get(source, ()), *self._receiving.get(to, ()))
        if self._racks is None:
            return Route(ends, latency_s)
        up, down = here // self._racks.hosts, there // self._racks.hosts
        if up == down:
            return Route(ends, latency_s)
        first = 3 * self._hosts
        between = (first + up, first + self._rack_count + down)
        return Route((*ends, *between), latency_s + self._racks.latency_s)

    def _limit_servers(self, servers: tuple[int, ...], bandwidth_bytes_per_s: float) -> None:
        first = len(self.bandwidths)
        for number, server in enumerate(servers):
            self._sending[server] = (first + number,)
            self._receiving[server] = (first + len(servers) + number,)
        self.bandwidths += [bandwidth_bytes_per_s] * (2 * len(servers))


def _uplinks(cluster: Cluster, nics: list[Link]) -> list[float]:
    racks = cluster.racks
    if racks is None:
        return []
    starts = range(0, len(nics), racks.hosts)
    if racks.uplink_bandwidth_bytes_per_s is not None:
        return [racks.uplink_bandwidth_bytes_per_s] * len(starts)
    assert racks.oversubscription is not None
    return [
        sum(nic.bandwidth_bytes_per_s for nic in nics[start : start + racks.hosts]) / racks.oversubscription
        for start in starts
    ]
