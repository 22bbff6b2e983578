from __future__ import annotations

import pytest

from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.simulated_run import check_slowness, step_times
from polyrhythm.strategies.placements.shared import Shared
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
