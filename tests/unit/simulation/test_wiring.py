from __future__ import annotations

import pytest

from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import Cluster, parse_cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.simulated_run import Wiring
from polyrhythm.strategies.placements.shared import Shared
from unit.simulation.clusters import cluster

NIC = {"latency_s": 0.25, "bandwidth_bytes_per_s": 1024}
INSIDE = {"latency_s": 0.125, "bandwidth_bytes_per_s": 4096}


def arrivals(where: Cluster, workers: int, *transfers: tuple[int, int, int], servers: int = 0) -> list[float]:
    """Starts transfers (from, to, bytes) all at once; gives when each arrives."""
    time, wiring = VirtualTime(), Wiring(lay_out(where, workers, servers, Shared()))
    network = ContendedNetwork(time, wiring.bandwidths, wiring.route)
    arrived = [0.0] * len(transfers)
    for number, (source, to, nbytes) in enumerate(transfers):

        def note(number: int = number) -> None:
            arrived[number] = time.now()

        network.transfer(source, to, nbytes, lambda: None, note)
    time.run()
    return arrived


def test_between_hosts_a_message_crosses_two_nics() -> None:
    assert arrivals(cluster({"count": 2}, nic=NIC), 2, (0, 1, 2048)) == [2.25]


def test_inside_a_host_the_link_is_shared_by_all_and_the_nic_is_free() -> None:
    where = cluster({"workers": 3}, {}, nic=NIC, inside=INSIDE)
    assert arrivals(where, 4, (0, 1, 4096)) == [1.125]
    assert arrivals(where, 4, (0, 1, 4096), (2, 1, 4096), (0, 3, 1024)) == [2.125, 2.125, 1.25]


def test_an_oversubscribed_uplink_slows_what_leaves_the_rack_only() -> None:
    where = cluster({"count": 8}, nic=NIC, racks={"hosts": 4, "oversubscription": 4, "latency_s": 0.5})
    # an uplink carries 4 * 1024 / 4; three flows share it, and one stays in the rack
    leaving = [(0, 4, 1024), (1, 5, 1024), (2, 6, 1024)]
    assert arrivals(where, 8, *leaving, (3, 0, 1024)) == pytest.approx([3.75, 3.75, 3.75, 1.25], rel=1e-12)


def test_a_server_that_is_slower_than_its_nic_limits_what_others_send_it_and_get_from_it() -> None:
    where = cluster({"count": 3, "cores": 2}, nic=NIC, inside=INSIDE, server_bandwidth_bytes_per_s=512)
    server = 3  # on the last worker's host
    assert arrivals(where, 3, (0, server, 512), (1, server, 512), servers=1) == [2.25, 2.25]
    assert arrivals(where, 3, (server, 0, 512), (1, server, 512), servers=1) == [1.25, 1.25]
    assert arrivals(where, 3, (2, server, 4096), (0, 1, 1024), servers=1) == [1.125, 1.25]


TREE = [
    {"places": 1, "latency_s": 0.125, "bandwidth_bytes_per_s": 2048},  # an accelerator to its switch
    {"places": 2, "latency_s": 0.25, "bandwidth_bytes_per_s": 1024},  # a switch to its processor
    {"places": 4, "latency_s": 0.5, "bandwidth_bytes_per_s": 512},  # a processor to memory and NIC
]


def test_in_a_tree_a_message_climbs_to_where_two_places_meet() -> None:
    where = cluster({"workers": 4, "tree": TREE}, {}, nic=NIC, inside=INSIDE)
    assert arrivals(where, 5, (0, 1, 2048)) == [1.25]  # below one switch
    assert arrivals(where, 5, (0, 2, 2048)) == [2.75]  # over both switches, which carry half as much
    assert arrivals(where, 5, (0, 4, 2048)) == [4 + 0.875 + 0.25]  # up to the top, and over the NICs
    assert arrivals(where, 5, (4, 3, 512)) == [1 + 0.25 + 0.875]  # and down


def test_levels_of_a_tree_lie_one_in_the_other() -> None:
    with pytest.raises(
        RequestError, match="tree: the 3 places of a level must be a multiple of the 2 below it"
    ):
        parse_cluster(
            "hosts: [{name: a, count: 1, tree: [{places: 2, latency_s: 0, bandwidth_bytes_per_s: 1}, "
            "{places: 3, latency_s: 0, bandwidth_bytes_per_s: 1}]}]\n"
            "nic: {latency_s: 0, bandwidth_bytes_per_s: 1}\ninside: {latency_s: 0, bandwidth_bytes_per_s: 1}\n"
            "step_time: constant(seconds=1)\n",
            "trees.yaml",
        )
