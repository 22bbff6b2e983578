"""Which losses a script's launcher bears."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from polyrhythm.config.assemble import strategy_from
from polyrhythm.launch.script.meeting import LossTolerance, Place, Places


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
    strategy = strategy_from(spec)
    tolerance = LossTolerance.from_text(LossTolerance.of(strategy, 3).to_text())
    ranks = range(3 + strategy.traits(1).servers)
    assert {rank for rank in ranks if tolerance.tolerates(rank)} == borne


def test_neighbouring_servers_cannot_both_be_spared() -> None:
    tolerance = LossTolerance.of(strategy_from("parameter_server(servers=4, replicas=2)"), 2)
    lost = {2}
    assert [rank for rank in (3, 4, 5) if tolerance.tolerates(rank, lost)] == [4]


def test_places_are_as_the_launcher_says_or_as_one_knows_where_nobody_says() -> None:
    store = dist.HashStore()
    places = Places(store, 3, lambda worker: worker == 1)
    assert places.read() == [Place.HERE, Place.GONE, Place.HERE]
    Places(store, 3).begin()
    places.set(2, Place.WAITING)
    assert places.read() == [Place.HERE, Place.HERE, Place.WAITING]
    assert places.of(2) is Place.WAITING


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("synchronous", ""),
        ("parameter_server", ""),
        ("mixed", "mixed goes on without a worker under polyrhythm train only, not in a loop of your own"),
        ("mixed(inside=local_sgd)", "mixed(inside=local_sgd) does not go on without a worker"),
    ],
)
def test_it_says_why_the_death_of_a_worker_ends_the_run(spec: str, said: str) -> None:
    assert LossTolerance.of(strategy_from(spec), 3).why_not == said
