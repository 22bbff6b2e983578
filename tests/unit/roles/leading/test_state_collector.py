"""Collection of the states for a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from conformance.jobs import strategy
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.leading.state_collector import StateCollector


def state_of(worker: int, step: int) -> WorkerState:
    return WorkerState(Account(worker, step, step, 0, 0, 0.0, 0, {}), {}, {}, {})


def collector(asked: list[int]) -> StateCollector:
    own = state_of(0, 2)
    leader: dict[str, Any] = {
        "attendance": SimpleNamespace(present={0, 1}, losses=lambda worker: 0),
        "workers": SimpleNamespace(states={0: own}),
        "servers": SimpleNamespace(request=dict, all_of=lambda states: []),
        "is_final": lambda worker: False,
        "send_to_worker": lambda worker, message: asked.append(worker),
    }
    traits = strategy("parameter_server").traits(2)
    every = Interval.parse("2steps")
    return StateCollector(every, cast(Leader, SimpleNamespace(**leader)), traits, lambda: 0.0)


def test_an_answer_that_is_received_before_the_collection_begins_counts() -> None:
    asked: list[int] = []
    states = collector(asked)
    assert not states.due(1, 0)
    assert states.due(2, 0)
    assert asked == [1]
    states.take(state_of(1, 3))
    states.begin(2, awaits=True)
    held = states.held()
    assert held is not None
    assert {worker: state.account.step for worker, state in held[0].items()} == {0: 2, 1: 3}


def test_a_state_from_before_the_request_does_not_count() -> None:
    states = collector([])
    states.due(1, 0)
    states.take(state_of(1, 1))
    assert states.due(2, 0)
    states.begin(2, awaits=True)
    assert states.held() is None
    states.take(state_of(1, 3))
    assert states.held() is not None
