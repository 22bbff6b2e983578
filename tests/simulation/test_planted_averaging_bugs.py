"""Bugs planted into centers, sums, sites and shared memory: what these strategies declare of themselves finds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyrhythm.events import Event, RunEnded
from polyrhythm.simulation.trials import play
from polyrhythm.strategies.parameter_server.downpour import SumRule, SumWorker
from polyrhythm.strategies.parameter_server.elastic.averaging import CenterLink, CenterRule
from polyrhythm.strategies.parameter_server.gaia import Post, SiteGate, SiteRound
from polyrhythm.strategies.parameter_server.hogwild import HogwildWorker
from polyrhythm.verification.invariant import Violation
from simulation.trying import trial

Method = Callable[..., Any]


def center_moves_twice(before: Method) -> Method:
    def planted(self: CenterRule, batch: Any, version: int) -> Any:
        applied = before(self, batch, version)
        self.values.add_(1.0)
        return applied

    return planted


def worker_keeps_its_place(before: Method) -> Method:
    def planted(self: CenterLink) -> bool:
        kept = self._vector.clone()
        stop: bool = before(self)
        self._vector.copy_(kept)
        return stop

    return planted


def sum_is_applied_twice(before: Method) -> Method:
    def planted(self: SumRule, batch: Any, version: int) -> Any:
        if version == 3:
            before(self, batch, version)
        return before(self, batch, version)

    return planted


def sum_is_forgotten(before: Method) -> Method:
    def planted(self: SumWorker, step: Any, learning_rate: float) -> None:
        if step.number == 3:
            self._sums[0].zero_()
        before(self, step, learning_rate)

    return planted


def packet_is_lost(before: Method) -> Method:
    def planted(self: Post, peer: int, told: SiteRound) -> Any:
        found = before(self, peer, told)
        return None if told.number == 2 else found

    return planted


def nobody_waits(before: Method) -> Method:
    def planted(self: SiteGate) -> Any:
        self._post._gone.update(self._post.peers)
        return before(self)

    return planted


def update_is_lost(before: Method) -> Method:
    def planted(self: HogwildWorker, step: Any, learning_rate: float) -> Any:
        kept = self._vector.clone()
        stop = before(self, step, learning_rate)
        if step.number == 2:
            self._vector.copy_(kept)
        return stop

    return planted


PLANTS: list[tuple[str, type, str, Callable[[Method], Method], str]] = [
    (
        "easgd(tau=1)",
        CenterRule,
        "apply",
        center_moves_twice,
        "the center for rank|the difference for rank",
    ),
    ("easgd(tau=1)", CenterLink, "take", worker_keeps_its_place, "own parameters after step"),
    ("downpour", SumRule, "apply", sum_is_applied_twice, "parameters for rank"),
    ("downpour(n_push=3)", SumWorker, "_push", sum_is_forgotten, "the sum of rank|parameters for rank"),
    ("gaia(threshold=0)", Post, "receive", packet_is_lost, "the final parameters"),
    ("gaia(lag=0)", SiteGate, "applied", nobody_waits, "rounds of site"),
    ("hogwild", HogwildWorker, "gradients_ready", update_is_lost, "the shared vector after step"),
]


@pytest.mark.parametrize(("spec", "where", "method", "plant", "found"), PLANTS)
def test_a_planted_bug_is_found(
    spec: str,
    where: type,
    method: str,
    plant: Callable[[Method], Method],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = trial(spec, workers=3, steps=8, faults="slow(rank=2, factor=5)")
    play(tried, 0, lambda event: None)
    monkeypatch.setattr(where, method, plant(getattr(where, method)))
    with pytest.raises(Violation, match=found):
        play(tried, 0, lambda event: None)


@pytest.mark.parametrize(
    "spec",
    [
        "easgd(tau=1, servers=2)",
        "easgd(mode=synchronous, tau=2)",
        "downpour(n_fetch=3, n_push=2, servers=2)",
        "downpour(warm_start_steps=2)",
        "gaia(sites=3, servers=2, threshold=0, lag=0)",
        "hierarchical(servers=2, consistency=asynchronous)",
    ],
)
def test_what_is_declared_holds_under_faults(spec: str) -> None:
    for seed in range(20):
        events: list[Event] = []
        play(trial(spec, workers=3, steps=4), seed, events.append)
        ended = events[-1]
        assert isinstance(ended, RunEnded), f"seed {seed}"
        assert ended.outcome == "done", f"seed {seed}"
