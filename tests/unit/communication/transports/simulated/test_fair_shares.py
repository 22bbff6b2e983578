from __future__ import annotations

import random
from math import inf

import pytest

from polyrhythm.communication.transports.simulated.contended_network import Demand, fair_rates


@pytest.mark.parametrize("seed", range(20))
def test_every_flow_is_stopped_by_a_full_link_where_none_has_more(seed: int) -> None:
    """Bertsekas and Gallager's condition, which only the max-min fair rates meet."""
    draw = random.Random(seed)
    capacities = {link: draw.uniform(1, 10) for link in range(8)}
    demands = {
        key: Demand(
            tuple(sorted(draw.sample(range(8), draw.randint(1, 4)))),
            draw.randint(1, 5),
            draw.choice([inf, draw.uniform(0.1, 2)]),
        )
        for key in range(15)
    }
    rates = fair_rates(capacities, demands)

    def load(link: int) -> float:
        return sum(rates[key] * demand.flows for key, demand in demands.items() if link in demand.links)

    for link, capacity in capacities.items():
        assert load(link) <= capacity * (1 + 1e-12)
    for key, demand in demands.items():
        at_its_limit = rates[key] == pytest.approx(demand.limit, rel=1e-9)
        stopped = [
            link
            for link in demand.links
            if load(link) == pytest.approx(capacities[link], rel=1e-9)
            and all(
                rates[other] <= rates[key] * (1 + 1e-9) for other in demands if link in demands[other].links
            )
        ]
        assert at_its_limit or stopped
