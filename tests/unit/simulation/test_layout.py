from __future__ import annotations

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import open_cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.strategies.placements.dedicated import Dedicated
from polyrhythm.strategies.placements.shared import Shared
from unit.simulation.clusters import cluster


def test_workers_fill_hosts_in_order() -> None:
    layout = lay_out(cluster({"accelerators": 2}, {"workers": 3}, {}), 5, 0, Shared())
    assert layout.host_of == (0, 0, 1, 1, 1)
    assert layout.roles.workers == (0, 1, 2, 3, 4)
    assert layout.hosts_used == [0, 1]


def test_shared_servers_go_to_workers_hosts_from_the_last_one_backwards() -> None:
    layout = lay_out(cluster({"count": 4, "cores": 4}), 3, 2, Shared())
    assert layout.host_of == (0, 1, 2, 1, 2)
    assert layout.roles.servers == (3, 4)


def test_where_work_is_drawn_the_fastest_host_has_the_first_server() -> None:
    where = cluster({"cores": 8}, {"cores": 8, "speed": 3}, {"cores": 8}, {"cores": 2, "speed": 3})
    assert lay_out(where, 4, 1, Shared()).host_of[4:] == (3,)
    assert lay_out(where, 4, 1, Shared(), draws=True).host_of[4:] == (1,)
    assert lay_out(where, 4, 3, Shared(), draws=True).host_of[4:] == (1, 2, 3)
    even = cluster({"count": 4, "cores": 4})
    assert lay_out(even, 3, 2, Shared(), draws=True) == lay_out(even, 3, 2, Shared())


def test_bsc_has_eight_workers_and_seven_servers_on_eight_nodes() -> None:
    layout = lay_out(open_cluster("bsc"), 8, 7, Shared())
    assert layout.host_of[8:] == (1, 2, 3, 4, 5, 6, 7)
    factors = [layout.step_factor(worker) for worker in range(8)]
    assert factors == [1.0] + [16 / 15] * 7  # a server takes one of the 16 cores that feed the GPUs


def test_dedicated_servers_have_hosts_of_their_own() -> None:
    layout = lay_out(cluster({"count": 5, "cores": 2}), 2, 4, Dedicated())
    assert layout.host_of == (0, 1, 2, 3, 4, 2)
    assert layout.step_factor(0) == 1.0


@pytest.mark.parametrize(
    ("workers", "servers", "placement", "message"),
    [
        (4, 0, Shared(), "4 workers do not fit on cluster small: it has 3 places for workers on 3 hosts"),
        (1, 3, Shared(), "3 servers do not fit on cluster small: the workers' hosts hold 2, one a core"),
        (
            3,
            1,
            Dedicated(),
            "the hosts without workers hold 0, one a core; use fewer workers or servers or placement=shared",
        ),
        (1, 2, Shared(), "leave its workers nothing to compute with"),
    ],
)
def test_more_ranks_than_places_are_refused(
    workers: int, servers: int, placement: Shared | Dedicated, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        lay_out(cluster({"count": 3, "cores": 2}), workers, servers, placement)


def test_a_server_takes_a_core_from_the_worker_beside_it() -> None:
    layout = lay_out(cluster({"count": 2, "cores": 4}), 2, 3, Shared())
    assert layout.host_of == (0, 1, 0, 1, 1)
    assert layout.step_factor(0) == pytest.approx(4 / 3, rel=1e-12)
    assert layout.step_factor(1) == pytest.approx(4 / 2, rel=1e-12)


def test_a_host_may_say_itself_what_a_server_takes_and_how_fast_it_is() -> None:
    layout = lay_out(cluster({"cores": 4, "server_takes": 0.2, "speed": 0.5}), 1, 1, Shared())
    assert layout.step_factor(0) == pytest.approx(2 / 0.8, rel=1e-12)


def test_only_used_hosts_are_paid_for() -> None:
    layout = lay_out(cluster({"count": 3, "price_per_hour": 0.5}, {"price_per_hour": 9}), 2, 0, Shared())
    assert layout.price_per_hour == 1.0
