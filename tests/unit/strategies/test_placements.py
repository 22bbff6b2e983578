"""Which ranks become servers, by the hosts that they are on."""

from __future__ import annotations

import pytest

from polyrhythm.strategies.placements.dedicated import Dedicated
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.role_assignment import roles_for


@pytest.mark.parametrize(
    ("hosts", "servers", "first", "chosen"),
    [
        ([0, 0, 0], 1, [], (2,)),
        ([0, 1, 2], 2, [], (1, 2)),  # nobody has a worker to keep
        ([0, 0, 1, 1], 1, [], (3,)),
        ([0, 0, 1, 1], 1, [0], (1,)),  # the fast host's workers have it near
        ([0, 0, 1, 1], 2, [0], (1, 3)),
        ([0, 0, 1, 1], 3, [0], (1, 2, 3)),
        ([0, 0, 1], 1, [], (1,)),  # else host 1 would have no worker
        ([0, 0, 1], 2, [], (1, 2)),
        ([0, 0, 1, 1, 2, 2], 2, [1], (3, 5)),
        ([0, 0, 1, 1, 2, 2], 2, [1, 0], (1, 3)),
        ([0, 0, 0, 1, 2], 2, [1], (1, 2)),
        # BSC's nodes: 8 workers and 7 servers on 8, of which one has a worker alone.
        ([node for node in range(8) for _ in range(2 if node < 7 else 1)], 7, [], tuple(range(1, 14, 2))),
    ],
)
def test_servers_share_hosts_with_workers(
    hosts: list[int], servers: int, first: list[int], chosen: tuple[int, ...]
) -> None:
    roles = roles_for(hosts, servers, Shared(), first)
    assert roles.servers == chosen
    assert roles.workers == tuple(rank for rank in range(len(hosts)) if rank not in chosen)


def test_dedicated_servers_are_on_the_last_hosts_however_fast_others_are() -> None:
    assert roles_for([0, 1, 2, 3], 2, Dedicated(), [0]).servers == (2, 3)
