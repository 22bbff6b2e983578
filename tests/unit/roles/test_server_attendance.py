"""Which servers are there, and whom the leader asks for which shard."""

from __future__ import annotations

import json

import pytest

from polyrhythm.errors import PeerLost
from polyrhythm.roles.ledger import ServerAttendance, ServerLosses
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer

RANKS = (5, 6, 7)


def attendance() -> ServerAttendance:
    return ServerAttendance(RANKS, ParameterServer(servers=3, replicas=2).faults(2), ServerLosses())


def test_a_successor_counts_once_it_has_its_shards() -> None:
    servers = attendance()
    assert [servers.holder(shard) for shard in range(3)] == [5, 6, 7]
    assert servers.lose(5)
    assert not servers.lose(5)  # its successor, before it had its shards
    assert (servers.present, servers.holder(0)) == ([6, 7], 6)
    servers.losses.join(5)
    assert (servers.present, servers.holder(0)) == ([5, 6, 7], 5)
    assert (servers.losses.lost, servers.losses.joined) == (1, 1)


def test_neighbors_are_not_spared_unless_one_has_a_successor() -> None:
    servers = attendance()
    servers.lose(7)
    with pytest.raises(PeerLost, match="rank 5 is gone"):
        servers.lose(5)
    servers.losses.join(7)
    assert servers.lose(5)


def test_a_next_leader_reads_what_the_last_one_knew() -> None:
    servers = attendance()
    servers.lose(6)
    told = json.loads(json.dumps(servers.losses.to_json()))
    assert ServerLosses.from_json(told) == ServerLosses(lost=1, joined=0, absent={6})
