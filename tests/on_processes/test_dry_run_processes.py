"""A dry run over real links: the same role, with every number of the model and a pace that really sleeps."""

from __future__ import annotations

import pytest

from conformance.jobs import strategy
from conformance.rank_processes import RankProcesses, Seat
from polyrhythm.events import Event
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.world import DrawnPace, World
from polyrhythm.simulation.run import dry_events, perform
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.training.model_sizes import ModelSizes

WORKERS, STEPS, STEP_S = 2, 4, 0.02


def _dry_run(spec: str) -> DryRun:
    sizes = ModelSizes((3000, 2000), (0.5, 0.5))
    return DryRun(strategy=strategy(spec), workers=WORKERS, steps=STEPS, sizes=sizes, exact=True)


def _perform(seat: Seat, spec: str) -> None:
    _home, network = seat.connect()
    dry_run = _dry_run(spec)
    events: list[Event] = []
    roles = roles_in_order(WORKERS, dry_run.strategy.traits(WORKERS).servers)
    pace = DrawnPace(network.clock, lambda: STEP_S)
    perform(dry_run, World(network, roles, pace, emit=events.append))
    if seat.rank == 0:
        seat.tell(events[-1].to_json()["result"])
    seat.wait_for_word()  # until nobody has anything more to hear


@pytest.mark.parametrize("spec", ["synchronous(collective=direct)", "parameter_server", "mixed(servers=2)"])
def test_the_bytes_and_steps_are_those_of_the_simulation(spec: str) -> None:
    size = WORKERS + strategy(spec).traits(WORKERS).servers
    with RankProcesses(_perform, size, spec) as ranks:
        real = ranks.hear(0)
        for rank in range(size):
            ranks.say(rank, "go")
        ranks.wait_for_end(list(range(size)))
    simulated = dry_events(_dry_run(spec))[-1].to_json()["result"]
    same = ("strategy", "workers", "servers", "steps", "epochs")
    assert {key: real[key] for key in same} == {key: simulated[key] for key in same}
    assert real["seconds"] >= STEPS * STEP_S
    counted, declared = real["bytes_sent_per_step"], simulated["bytes_sent_per_step"]
    if "direct" in spec or "server" in strategy(spec).name:
        assert counted == declared
    else:  # a library's own all-reduce is counted by its formula
        assert counted == pytest.approx(declared, rel=0.05)
    assert sum(real["staleness"]["histogram"].values()) == sum(simulated["staleness"]["histogram"].values())
