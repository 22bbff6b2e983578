"""Who is held up by whose loss, and when a leader that waits regroups with its group."""

from __future__ import annotations

import pytest

from conformance.jobs import strategy
from polyrhythm.roles.leading.leader import Neighbors


@pytest.mark.parametrize(
    ("spec", "worker", "beside", "held_up"),
    [
        ("mixed(replicas=2, consistency=synchronous)", 1, True, ()),
        ("mixed(replicas=2, consistency=synchronous)", 3, False, (2, 3)),
        ("mixed(replicas=2, consistency=synchronous)", 4, False, (4,)),
        ("mixed(replicas=5)", 4, True, ()),
        ("parameter_server(consistency=synchronous)", 1, False, ()),
    ],
)
def test_groups_other_than_worker_0s_may_fall_behind(
    spec: str, worker: int, beside: bool, held_up: tuple[int, ...]
) -> None:
    chosen = strategy(spec)
    neighbors = Neighbors(chosen.traits(5), chosen.faults(5))
    assert (neighbors.beside_leader(worker), neighbors.held_up_by(worker)) == (beside, held_up)
