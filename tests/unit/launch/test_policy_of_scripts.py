"""Which losses a script's launcher bears."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from polyrhythm.config.assemble import strategy_from
from polyrhythm.launch.script import WorkerStatus, WorkerStatuses, policy_of
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.role_assignment import roles_in_order


def policy(spec: str, workers: int) -> FaultPolicy:
    told = json.loads(json.dumps(policy_of(strategy_from(spec), workers)))
    return FaultPolicy.from_json(told["policy"])


@pytest.mark.parametrize(
    ("spec", "borne"),
    [
        ("synchronous", {0, 1, 2}),
        ("hybrid", set()),
        ("parameter_server(servers=3)", {0, 1, 2}),
        ("gaia", {0, 1, 2}),
        ("mixed", set()),
        ("hogwild", {0, 1, 2}),
        ("parameter_server(servers=3, replicas=2)", {0, 1, 2, 3, 4, 5}),
    ],
)
def test_it_asks_the_strategy(spec: str, borne: set[int]) -> None:
    roles = roles_in_order(3, strategy_from(spec).traits(3).servers)
    found = policy(spec, 3)
    assert {rank for rank in range(roles.size) if found.survives(rank, roles, leader_returns=True)} == borne


def test_neighboring_servers_cannot_both_be_spared() -> None:
    found, roles = policy("parameter_server(servers=4, replicas=2)", 2), roles_in_order(2, 4)
    assert [rank for rank in (3, 4, 5) if found.survives(rank, roles, [2])] == [4]


def test_places_are_as_the_launcher_says_or_as_one_knows_where_nobody_says() -> None:
    store = dist.HashStore()
    statuses = WorkerStatuses(store, 3, lambda worker: worker == 1)
    assert statuses.read() == [WorkerStatus.HERE, WorkerStatus.GONE, WorkerStatus.HERE]
    WorkerStatuses(store, 3).begin()
    statuses.set(2, WorkerStatus.WAITING)
    assert statuses.read() == [WorkerStatus.HERE, WorkerStatus.HERE, WorkerStatus.WAITING]
    assert statuses.of(2) is WorkerStatus.WAITING


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("synchronous", ""),
        ("parameter_server", ""),
        (
            "mixed",
            "mixed survives the loss of a worker under polyrhythm train only, not in a loop of your own",
        ),
        (
            "mixed(inside=local_sgd)",
            "mixed(inside=local_sgd) survives the loss of a worker under polyrhythm train only, not in a "
            "loop of your own",
        ),
    ],
)
def test_it_says_why_the_death_of_a_worker_ends_the_run(spec: str, said: str) -> None:
    assert policy_of(strategy_from(spec), 3)["why_not"] == said
