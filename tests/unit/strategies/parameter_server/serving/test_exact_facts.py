"""Facts of objects that change: what is given is a copy, and comes back as it was."""

from __future__ import annotations

import json

import pytest

from polyrhythm.strategies.parameter_server.consistency.backup import Backup
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import BoundedStaleness
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.session import exact_facts, take_exact_facts


@pytest.mark.parametrize("rule", [Synchronous(), Backup(spare=1), Softsync(n=1), BoundedStaleness(s=1)])
def test_a_gate_in_the_middle_of_a_step_goes_on_in_its_copy(rule: Consistency) -> None:
    gate, copy = rule.gate(3), rule.gate(3)
    for pusher in range(3):
        gate.ask(pusher, 0)
    gate.arrive(2, 0)
    take_exact_facts(copy, json.loads(json.dumps(exact_facts(gate))))
    for pusher in (0, 1):
        assert copy.arrive(pusher, 0) == gate.arrive(pusher, 0)
    assert copy.leave(1) == gate.leave(1)
    assert copy.arrive(0, 1) == gate.arrive(0, 1)
    assert exact_facts(copy) == exact_facts(gate)


def test_what_is_given_does_not_change_with_the_object() -> None:
    gate = Softsync(n=1).gate(3)
    before = exact_facts(gate)
    gate.arrive(0, 0)
    assert (before["_held"], exact_facts(gate)["_held"]) == ([], [0])
