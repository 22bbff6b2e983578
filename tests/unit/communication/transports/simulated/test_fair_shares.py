from __future__ import annotations

import random
from math import inf

import pytest

from polyrhythm.communication.transports.simulated.contended_network import Demand, fair_rates


def test_one_link_is_divided_evenly() -> None:
    assert fair_rates({"a": 12.0}, {1: Demand(("a",), 1), 2: Demand(("a",), 2)}) == {1: 4.0, 2: 4.0}


def test_a_textbook_example() -> None:
    # Four flows on links of 10, 4 and 6. Link b fills first, at 2 each; then c at (6-2)/1 for flow 3;
    # a has 10 - 2 left for flows 0 and 3, of which 3 stops at 4.
    capacities = {"a": 10.0, "b": 4.0, "c": 6.0}
    demands = {
        0: Demand(("a",), 1),
        1: Demand(("a", "b"), 1),
        2: Demand(("b", "c"), 1),
        3: Demand(("a", "c"), 1),
    }
    assert fair_rates(capacities, demands) == {0: 4.0, 1: 2.0, 2: 2.0, 3: 4.0}


def test_what_a_limited_flow_leaves_is_shared_by_the_others() -> None:
    rates = fair_rates({"a": 10.0}, {1: Demand(("a",), 1, limit=2.0), 2: Demand(("a",), 2)})
    assert rates == {1: 2.0, 2: 4.0}


def test_a_bundle_without_links_gets_its_limit() -> None:
    assert fair_rates({}, {7: Demand((), 1, limit=3.0)}) == {7: 3.0}


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
