"""Placement of ranks on hosts.

    workers            0 … N-1 fill the hosts in order, as many on each as it has places
    shared servers     one on every workers' host in turn, as many as it has cores; from the last host backwards, or,
                       with dynamic batches, first on the one that computes fastest next to a server
    dedicated servers  on hosts without workers, one on each in turn, as many as it has cores

Ranks are numbered as a local run numbers them (servers last), so that both learn the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import Cluster, HostKind
from polyrhythm.strategies.role_assignment import Placement, RoleAssignment


@dataclass(frozen=True)
class Layout:
    """Placement of ranks on the hosts of a cluster.

    Attributes:
        cluster: the hosts.
        roles: ranks by role.
        host_of: the number of each rank's host.
    """

    cluster: Cluster
    roles: RoleAssignment
    host_of: tuple[int, ...]

    @property
    def hosts_used(self) -> list[int]:
        """Numbers of the hosts with a rank."""
        return sorted(set(self.host_of))

    @property
    def price_per_hour(self) -> float | None:
        """Price per hour of all hosts used; None where the price of one is not known."""
        prices = [self.cluster.machines[host].price_per_hour for host in self.hosts_used]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def slowest_link_bytes_per_s(self) -> float:
        """Bandwidth of the slowest link between hosts with ranks; with one host, of the link inside it."""
        cluster, used = self.cluster, self.hosts_used
        machines = [cluster.machines[host] for host in used]
        links = [
            (each.nic or cluster.nic) if len(used) > 1 else (each.inside or cluster.inside)
            for each in machines
        ]
        return min(link.bandwidth_bytes_per_s for link in links)

    def step_factor(self, worker: int) -> float:
        """Return the factor between a step and the cluster's step time, on a host of speed 1 without other work.

        Where the cluster has a cost of updates, servers slow workers only while they are busy, and this is
        not included.
        """
        host = self.host_of[worker]
        machine = self.cluster.machines[host]
        always = self.cluster.server_update is None
        servers = sum(self.host_of[rank] == host for rank in self.roles.servers) if always else 0
        return machine.slowed_by(servers) / machine.speed * self.cluster.step_factor


def lay_out(
    cluster: Cluster, workers: int, servers: int, placement: Placement, *, draws: bool = False
) -> Layout:
    """Return a layout of ranks on hosts.

    Args:
        cluster: the hosts.
        workers: number of workers.
        servers: number of servers.
        placement: placement of the servers.
        draws: whether batches are dynamic: then servers should be near the workers of a fast host; else near
            those of the slowest.

    Raises:
        RequestError: there are more ranks than places, or servers leave a host's workers nothing to compute with.
    """
    places = [host for host, machine in enumerate(cluster.machines) for _ in range(machine.places)]
    if workers > len(places):
        raise RequestError(
            f"{workers} workers do not fit on cluster {cluster.name}: it has {len(places)} places for workers "
            f"on {len(cluster.machines)} hosts"
        )
    used = places[:workers]
    homes = _server_homes(cluster, used, servers, placement, draws=draws)
    roles = RoleAssignment(tuple(range(workers)), tuple(range(workers, workers + servers)))
    layout = Layout(cluster, roles, (*used, *homes))
    for worker in roles.workers:
        if layout.step_factor(worker) == float("inf"):
            machine = cluster.machines[layout.host_of[worker]]
            raise RequestError(
                f"the servers on {machine.name} of cluster {cluster.name} leave its workers nothing to compute "
                "with: use fewer servers or placement=dedicated"
            )
    return layout


def _server_homes(
    cluster: Cluster, used: list[int], servers: int, placement: Placement, *, draws: bool
) -> list[int]:
    if placement.dedicated:
        taken = set(used)
        hosts = [host for host in range(len(cluster.machines)) if host not in taken]
    else:
        hosts = sorted(set(used), reverse=True)
        if draws:
            machines = cluster.machines
            hosts.sort(key=lambda host: machines[host].slowed_by(1) / machines[host].speed)
    room = {host: cluster.machines[host].cores for host in hosts}
    if servers > sum(room.values()):
        where = "hosts without workers hold" if placement.dedicated else "workers' hosts hold"
        servers_do = "servers do" if servers > 1 else "server does"
        raise RequestError(
            f"{servers} {servers_do} not fit on cluster {cluster.name}: the {where} {sum(room.values())}, one a core; "
            f"use fewer {'workers or ' if placement.dedicated else ''}servers"
            f"{' or placement=shared' if placement.dedicated else ''}"
        )
    homes: list[int] = []
    while len(homes) < servers:
        for host in hosts:
            if room[host] and len(homes) < servers:
                room[host] -= 1
                homes.append(host)
    return homes if placement.dedicated else sorted(homes)


def shared_out(
    cluster: Cluster, runs: int, workers: int, servers: int, placement: Placement, *, draws: bool = False
) -> list[tuple[Cluster, tuple[int, ...]]]:
    """Divide a cluster among concurrent runs, each on places of its own.

    A host shared by two of them carries the messages of each as if the other did not exist.

    Args:
        cluster: the hosts.
        runs: number of runs.
        workers: workers of each.
        servers: servers of each.
        placement: placement of its servers.
        draws: see `lay_out`.

    Returns:
        For each run its part of the cluster, and the numbers of its hosts in the whole.

    Raises:
        RequestError: there are too few places, or the cluster has ranks, racks or times that its parts do not
            have.
    """
    for given, what in (
        (cluster.racks, "racks"),
        (cluster.slow, "slow"),
        (cluster.passing_slowness, "passing_slowness"),
        (cluster.faults, "faults"),
    ):
        if given:
            raise RequestError(
                f"{what} of cluster {cluster.name} are of one run's ranks and hosts, and here are {runs} runs: leave "
                "them out"
            )
    left = list(enumerate(cluster.machines))
    found = []
    for _ in range(runs):
        here = _with_hosts(cluster, [machine for _, machine in left])
        layout = lay_out(here, workers, servers, placement, draws=draws)
        working = Counter(layout.host_of[rank] for rank in layout.roles.workers)
        serving = Counter(layout.host_of[rank] for rank in layout.roles.servers)
        hosts = [
            machine.model_copy(update={"workers": working[place] or machine.places})
            for place, (_, machine) in enumerate(left)
            if place in layout.hosts_used
        ]
        found.append((_with_hosts(cluster, hosts), tuple(left[place][0] for place in layout.hosts_used)))
        left = [
            (
                number,
                machine.model_copy(
                    update={
                        "workers": machine.places - working[place],
                        "cores": max(1, machine.cores - serving[place]),
                    }
                )
                if working[place]
                else machine,
            )
            for place, (number, machine) in enumerate(left)
            if working[place] < machine.places and not (serving[place] and placement.dedicated)
        ]
        if not left and len(found) < runs:
            raise RequestError(
                f"{runs} runs of {workers} workers do not fit on cluster {cluster.name}: {len(found)} of them fill it"
            )
    return found


def _with_hosts(cluster: Cluster, hosts: list[HostKind]) -> Cluster:
    """Return a cluster of other hosts, each of them once."""
    values = {name: getattr(cluster, name) for name in Cluster.model_fields}
    single = tuple(machine.model_copy(update={"count": 1}) for machine in hosts)
    return Cluster(**{**values, "hosts": single})
