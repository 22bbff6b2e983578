"""Which invariants a strategy keeps: those of its family, and the general ones if it is registered nowhere."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from polyrhythm.specs import build, choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.strategy import Facts, Paper, Strategy
from polyrhythm.verification.families import Replicas, general, invariants_for
from polyrhythm.verification.invariant import Conditions, Invariant

GENERAL = ["Progress", "Versions", "EveryStep"]


def names(strategy: Strategy, workers: int = 4) -> list[str]:
    found = invariants_for(strategy, conditions(strategy, workers))
    return [type(each).__name__ for each in found]


def conditions(strategy: Strategy, workers: int) -> Conditions:
    nothing = torch.zeros(8)
    return Conditions(
        roles=roles_in_order(workers, strategy.traits(workers).servers),
        numbers=8,
        gradient=lambda worker, step: nothing,
        steps=6,
    )


def built(spec: str) -> Strategy:
    strategy = build("strategy", spec, *FAMILIES)
    assert isinstance(strategy, Strategy)
    return strategy


class Own(Strategy):
    """A strategy that is registered nowhere."""

    paper: ClassVar[Paper] = Paper("A. Author", "Title", "Venue", 2026)
    facts: ClassVar[Facts] = Facts(bytes_per_step="0", staleness="0", use_it="never")


class Registered(Own):
    """A strategy that registers one more."""


class OwnSynchronous(Synchronous):
    """A strategy that derives from one of ours."""


@pytest.mark.parametrize("name", [name for family in FAMILIES for name in choices(family)])
def test_every_strategy_keeps_the_general_ones_first(name: str) -> None:
    assert names(built(name))[:2] == GENERAL[:2]


@pytest.mark.parametrize(
    ("spec", "beside"),
    [
        ("hybrid", []),
        ("synchronous", ["Replicas"]),
        ("lazy_synchronous", ["LateReplicas"]),
        ("local_sgd", ["Meetings", "LocalModels"]),
        ("diloco", ["Meetings"]),
        ("hierarchical_averaging", ["Meetings", "Undisturbed", "Undisturbed"]),
        ("d_psgd", ["MatrixMixing"]),
        ("sgp", ["MatrixMixing"]),
        ("ad_psgd", ["Exchanges"]),
        ("hogwild", ["OneVector"]),
        ("parameter_server", ["Answers", "Staleness", "Ledger"]),
        ("dc_asgd", ["Answers", "Staleness"]),
        ("ssp", ["Answers", "Staleness", "ClockBound", "Ledger"]),
        ("softsync", ["Answers", "Staleness", "Gathered"]),
        ("backup_workers", ["Answers", "Staleness", "Gathered", "Ledger"]),
        ("downpour", ["Answers", "Sums"]),
        ("easgd", ["Answers", "Elastic"]),
        ("eamsgd", ["Answers", "Elastic"]),
        ("periodic_averaging", ["Answers", "Elastic"]),
        ("sandblaster", ["Answers", "Batches", "Undisturbed"]),
        ("gaia", ["Sites"]),
    ],
)
def test_a_family_keeps_its_own_beside(spec: str, beside: list[str]) -> None:
    assert names(built(spec)) == [*GENERAL, *beside]


def test_a_server_with_replicas_is_seen_as_its_shards() -> None:
    assert names(built("parameter_server(servers=2, replicas=2)")) == ["OfShards"]


def test_an_own_strategy_keeps_the_general_ones() -> None:
    assert names(Own()) == GENERAL


def test_an_own_strategy_may_register_more() -> None:
    @invariants_for.register
    def _(strategy: Registered, conditions: Conditions) -> list[Invariant]:
        return [*general(strategy, conditions), Replicas(conditions, [conditions.roles.workers], alone=False)]

    assert names(Registered()) == [*GENERAL, "Replicas"]
    assert names(Own()) == GENERAL


def test_a_derived_strategy_keeps_those_of_its_base() -> None:
    assert names(OwnSynchronous()) == names(Synchronous())
