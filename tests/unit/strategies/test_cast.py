"""Who becomes a server, and where."""

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.specs import choices
from polyrhythm.strategies.placements.dedicated import Dedicated
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.role_assignment import RoleAssignment, cast_for

FOUR_BY_TWO = [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_folder_is_the_list():
    assert choices("polyrhythm.strategies.placements") == {"dedicated": Dedicated, "shared": Shared}


@pytest.mark.parametrize(
    ("hosts", "count", "servers"),
    [
        (FOUR_BY_TWO, 1, (7,)),
        (FOUR_BY_TWO, 3, (3, 5, 7)),
        (FOUR_BY_TWO, 4, (1, 3, 5, 7)),
        (FOUR_BY_TWO, 6, (1, 3, 4, 5, 6, 7)),
        (FOUR_BY_TWO, 7, (1, 2, 3, 4, 5, 6, 7)),
        ([0, 0, 0, 0], 2, (2, 3)),
        ([0, 1, 2], 2, (1, 2)),
        ([0, 0, 0, 1], 2, (2, 3)),
        (FOUR_BY_TWO, 0, ()),
    ],
)
def test_shared_servers_are_spread_over_hosts(hosts, count, servers):
    assert Shared().servers(hosts, count) == servers


@pytest.mark.parametrize(("count", "servers"), [(0, ()), (2, (6, 7)), (3, (5, 6, 7))])
def test_dedicated_servers_take_the_last_hosts_whole(count, servers):
    assert Dedicated().servers(FOUR_BY_TWO, count) == servers


@pytest.mark.parametrize("placement", [Shared(), Dedicated()], ids=str)
@pytest.mark.parametrize("count", range(8))
def test_every_rank_has_one_role_and_rank_0_works(placement, count):
    cast = cast_for(FOUR_BY_TWO, count, placement)
    assert len(cast.servers) == count
    assert sorted(cast.workers + cast.servers) == list(range(8))
    assert cast.workers[0] == 0
    assert cast.size == 8


@pytest.mark.parametrize("placement", [Shared(), Dedicated()], ids=str)
def test_a_run_without_a_worker_is_refused(placement):
    with pytest.raises(
        RequestError, match=r"^2 processes cannot hold 2 servers and a worker: start at least 3$"
    ):
        cast_for([0, 0], 2, placement)


def test_only_dedicated_servers_keep_a_core():
    assert Dedicated.dedicated is True
    assert Shared.dedicated is False


def test_size():
    assert RoleAssignment((0, 1), (2,)).size == 3
    assert RoleAssignment((0,)).size == 1


def test_a_cast_knows_who_works() -> None:
    cast = RoleAssignment((0, 2, 3), (1, 4))
    assert [cast.works(rank) for rank in range(5)] == [True, False, True, True, False]
