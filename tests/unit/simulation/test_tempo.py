from __future__ import annotations

import math
import statistics

import pytest
import torch

from polyrhythm.communication.message import HEADER_BYTES, Kind, Message
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.simulation.simulated_run import ServerWork, check_slowness, step_times
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.training.model_sizes import ModelSizes
from unit.simulation.clusters import cluster


def test_slow_hosts_and_slow_ranks_multiply() -> None:
    layout = lay_out(cluster({"speed": 0.5, "workers": 2}, {}, slow={1: 3}), 3, 0, Shared())
    assert [step_times(layout, VirtualTime(), 0, rank)() for rank in range(3)] == [2.0, 6.0, 1.0]


def test_slowness_passes() -> None:
    passing = [
        {"rank": 0, "from_s": 1, "to_s": 2, "factor": 3},
        {"rank": 0, "from_s": 1.5, "to_s": 3, "factor": 5},
        {"rank": 1, "from_s": 0, "to_s": 9, "factor": 7},
    ]
    time = VirtualTime()
    draw = step_times(lay_out(cluster({"count": 2}, passing_slowness=passing), 2, 0, Shared()), time, 0, 0)
    drawn = []
    for at_s in (0.0, 1.0, 1.5, 2.0, 3.0):
        time.at(at_s, lambda: drawn.append(draw()))
    time.run()
    assert drawn == [1.0, 3.0, 15.0, 5.0, 1.0]


def test_ranks_of_a_host_have_its_good_and_bad_times_together() -> None:
    where = cluster({"workers": 2, "count": 2}, shared_slowness={"sigma": 0.3, "lasts_s": 10})
    layout, time, seen = lay_out(where, 4, 0, Shared()), VirtualTime(), []
    draws = [step_times(layout, time, 5, rank) for rank in range(4)]
    for at_s in (0.0, 9.0, 10.0):
        time.at(at_s, lambda: seen.append([draw() for draw in draws]))
    time.run()
    (first, second, third, fourth), later, other = seen
    assert first == second != third == fourth
    assert later == seen[0]
    assert other[0] == other[1] != first
    factors = [where.shared_slowness.factor(0, 0, 10.0 * turn) for turn in range(4000)]
    assert statistics.mean(factors) == pytest.approx(1, abs=0.02)
    assert statistics.stdev([math.log(factor) for factor in factors]) == pytest.approx(0.3, rel=0.05)


def test_updates_take_a_servers_time_and_the_workers_beside_it_feel_it() -> None:
    """Each gradient of 4 bytes takes 1 s of a core of four: in a second in which one is handled, a step takes 4/3 s."""
    cost = {"seconds": 0.5, "bandwidth_bytes_per_s": 8}
    layout = lay_out(cluster({"cores": 4}, {"cores": 4}, server_update=cost), 2, 1, Shared())
    assert [layout.step_factor(rank) for rank in range(2)] == [1, 1]
    time, seen = VirtualTime(), []
    work = ServerWork(layout, time, lambda message: message.tensor.nbytes)
    beside, apart = (step_times(layout, time, 0, rank, work) for rank in (1, 0))
    handle = work.handling(2)
    assert handle is not None

    def serve() -> None:
        for _ in range(2):
            handle(Message(Kind.PUSH, torch.zeros(1)))
        time.sleep(2)

    time.spawn("server", serve)
    for at_s in (0.0, 1.5, 2.5, 4.0):
        time.at(at_s, lambda: seen.append((time.now(), beside(), apart())))
    time.run()
    assert [each[0] for each in seen] == [0, 1.5, 2.5, 4]
    assert [each[2] for each in seen] == [1, 1, 1, 1]
    assert [each[1] for each in seen] == pytest.approx([1, 1 / (1 - 1 / 1.5 / 4), 4 / 3, 1])


def test_a_server_that_updates_slowly_bounds_a_run() -> None:
    """Four workers of a step a second each ask one server that takes a second an update: one update a second in all."""
    found = {}
    a_gradient = 103 * 4 + HEADER_BYTES
    for cost in (None, {"seconds": 0.5, "bandwidth_bytes_per_s": 2 * a_gradient}):
        where = cluster({"count": 4}, {"cores": 4}, server_update=cost)
        strategy = strategy_from("parameter_server(placement=dedicated)")
        dry_run = DryRun(
            strategy=strategy, workers=4, sizes=ModelSizes((103,), (1.0,)), steps=20, batch_size=1
        )
        events: list[Event] = []
        simulate_dry_on(lay_out(where, 4, 1, strategy.traits(4).placement), dry_run, events.append)
        figures = RunFigures.of(events)
        found[cost is not None] = figures.sustained_images_per_s
    assert found[False] == pytest.approx(4)
    assert found[True] == pytest.approx(1, rel=0.01)


def test_draws_depend_on_the_seed_and_the_rank_alone() -> None:
    def times(workers: int, seed: int, rank: int) -> list[float]:
        where = cluster({"count": 9}, step_time="exponential(mean=1)")
        draw = step_times(lay_out(where, workers, 0, Shared()), VirtualTime(), seed, rank)
        return [draw() for _ in range(3)]

    assert times(2, 5, 1) == times(9, 5, 1)
    assert times(2, 5, 1) != times(2, 5, 0)
    assert times(2, 5, 1) != times(2, 6, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slow": {2: 3}}, "slow names rank 2, which is a server: workers are 0 to 1"),
        (
            {"passing_slowness": [{"rank": 7, "from_s": 0, "to_s": 1, "factor": 2}]},
            "passing_slowness names rank 7, which does not exist",
        ),
    ],
)
def test_only_workers_can_be_slow(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_slowness(lay_out(cluster({"count": 2, "cores": 4}, **values), 2, 1, Shared()))
