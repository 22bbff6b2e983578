"""Compute threads of ranks that torchrun has started, one torchrun on a machine or several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.launch.torchrun import started_rank as neighbors
from polyrhythm.launch.torchrun.started_rank import asked_threads, share_of_cores, threads_beside
from polyrhythm.strategies.role_assignment import RoleAssignment

PATIENCE_S = 20
SYNCHRONOUS = strategy_from("synchronous")
FOUR = RoleAssignment((0, 1, 2, 3))


def test_two_torchruns_on_a_machine_share_its_cores_out() -> None:
    cores = set(range(8))
    one_machine = dict.fromkeys(range(4), ("a", cores))
    assert share_of_cores(0, one_machine, FOUR, SYNCHRONOUS) == 2
    two_machines = {0: ("a", cores), 1: ("a", cores), 2: ("b", cores), 3: ("a", cores)}
    assert [share_of_cores(rank, two_machines, FOUR, SYNCHRONOUS) for rank in range(4)] == [2, 2, 8, 2]


def test_ranks_that_are_kept_to_cores_of_their_own_share_with_nobody() -> None:
    places = {0: ("a", {0, 1, 2}), 1: ("a", {3, 4, 5}), 2: ("a", {3, 4, 5}), 3: ("a", {5, 6})}
    assert [share_of_cores(rank, places, FOUR, SYNCHRONOUS) for rank in range(4)] == [3, 1, 1, 1]


def test_servers_take_cores_only_where_they_are_dedicated() -> None:
    places = {rank: ("a", set(range(8))) for rank in range(4)}
    roles = RoleAssignment((0, 1, 2), (3,))
    shared, dedicated = (
        strategy_from(f"parameter_server(placement={placement})") for placement in ("shared", "dedicated")
    )
    assert share_of_cores(0, places, roles, shared) == 8 // 3
    places[4] = ("a", set(range(8)))
    roles = RoleAssignment((0, 1), (2, 3, 4))
    assert share_of_cores(0, places, roles, shared) == 4
    assert share_of_cores(0, places, roles, dedicated) == (8 - 3) // 2
    assert share_of_cores(0, places | {3: ("b", {0}), 4: ("b", {0})}, roles, dedicated) == (8 - 1) // 2


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2", "LOCAL_WORLD_SIZE": "2"}, 3),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, None),  # torchrun's own
    ],
)
def test_what_somebody_has_asked_for_counts(environment: dict[str, str], threads: int | None) -> None:
    assert asked_threads(environment) == threads


@pytest.mark.parametrize("asked", ["many", "0", "-1", "1.5"])
def test_what_is_no_number_is_refused(asked: str) -> None:
    with pytest.raises(RequestError, match=f"OMP_NUM_THREADS is '{asked}' in the environment"):
        asked_threads({"OMP_NUM_THREADS": asked})


def test_ranks_tell_each_other_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(neighbors, "usable_cores", lambda: set(range(6)))
    store = host_store()

    def rank(number: int) -> int:
        return threads_beside(local(number, 3, store.port), range(3), RoleAssignment((0, 1, 2)), SYNCHRONOUS)

    with ThreadPoolExecutor(3) as pool:
        assert [found.result(PATIENCE_S) for found in [pool.submit(rank, number) for number in range(3)]] == [
            2,
            2,
            2,
        ]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert rank(1) == 5
