"""The rules of evolution, of populations, and of curves that are extrapolated."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from polyrhythm.planning.learning_curve import extrapolated, hopeless
from polyrhythm.search.space import Parent, Space, evolved, succeeded

SPACE = Space.of({"lr": {"from": 0.001, "to": 1.0, "log": True}, "batch_size": [8, 16, 32, 64]})


def drawn(number: int, value: float) -> Parent:
    rng = Random(number)
    return Parent(number, SPACE.draw(lambda name, domain: domain.draw(rng)), value)


def differing(a: Parent, parameters: dict[str, object]) -> int:
    return sum(a.parameters[name] != parameters[name] for name in parameters)


def test_the_first_are_drawn_and_later_ones_have_one_parent_among_the_youngest() -> None:
    ended = [drawn(number, value=100.0 - number) for number in range(30)]  # the oldest are the best
    for count in range(5):
        free = evolved(ended[:count], SPACE, population=5, sample=2, rng=Random(count))
        assert set(free) == {"lr", "batch_size"}
    for seed in range(200):
        child = evolved(ended, SPACE, population=5, sample=2, rng=Random(seed))
        parents = [each.number for each in ended if differing(each, child) == 1 and shares_rate(each, child)]
        assert any(number >= 25 for number in parents)
    # With all_peers in the sample the parent is the best who is not too old, whatever is drawn.
    for seed in range(50):
        child = evolved(ended, SPACE, population=5, sample=5, rng=Random(seed))
        assert differing(ended[25], child) == 1


def shares_rate(parent: Parent, child: dict[str, object]) -> bool:
    same_rate = parent.parameters["lr"] == child["lr"]
    return same_rate or parent.parameters["batch_size"] == child["batch_size"]


def test_the_worst_fifth_goes_on_from_the_best_fifth_and_all_others_from_themselves() -> None:
    newest = {member: drawn(member, value=float(member)) for member in range(10)}
    for member in range(10):
        origins = set()
        for seed in range(40):
            parent, parameters = succeeded(member, newest, SPACE, Random(seed))
            origins.add(parent.number)
            if member >= 2:
                assert parameters == newest[member].parameters
            else:
                assert parameters != newest[member].parameters
        assert origins == ({8, 9} if member < 2 else {member})


def test_who_is_alone_or_as_good_as_the_best_stays() -> None:
    one = {0: drawn(0, 1.0)}
    assert succeeded(0, one, SPACE, Random(0)) == (one[0], one[0].parameters)
    equal = {member: drawn(member, 1.0) for member in range(5)}
    assert succeeded(0, equal, SPACE, Random(0))[0] is equal[0]


@pytest.mark.parametrize(
    ("end", "factor", "exponent"), [(0.9, -0.5, 0.7), (0.2, 1.5, 1.3), (0.97, -0.9, 2.1)]
)
def test_a_power_law_is_extrapolated(end: float, factor: float, exponent: float) -> None:
    curve = [(t, end + factor * t**-exponent) for t in range(1, 9)]
    found = extrapolated(curve, 40)
    assert found is not None
    assert found.value == pytest.approx(end + factor * 40.0**-exponent, abs=0.005)
    assert found.deviation < 0.01


def test_forecasts_are_as_wrong_as_they_say() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        end, factor, exponent = rng.uniform(0.5, 0.95), -rng.uniform(0.2, 0.5), rng.uniform(0.3, 2.5)
        truth = lambda t, end=end, factor=factor, exponent=exponent: end + factor * t**-exponent  # noqa: E731
        curve = [(t, truth(float(t)) + rng.normal(0, 0.01)) for t in range(1, 11)]
        found = extrapolated(curve, 30)
        assert found is not None
        inside += abs(found.value - truth(30.0)) <= 2 * found.deviation
    assert inside / 200 >= 0.85


def test_only_the_hopeless_are_given_up() -> None:
    poor = [(t, 0.5 - 0.3 * t**-1.0) for t in range(1, 8)]
    good = [(t, 0.95 - 0.6 * t**-0.6) for t in range(1, 8)]
    assert hopeless(poor, 20, best=0.8)
    assert not hopeless(good, 20, best=0.8)
    assert not hopeless(poor[:3], 20, best=0.8)
    assert not hopeless([(1, 0.1), (2, float("nan")), (3, 0.1), (4, 0.1)], 20, best=0.8)


def test_evolution_finds_the_network_whose_edges_are_all_the_best_kind() -> None:
    """Of 15,625 cells, within 600 trials; a parent is among the 50 youngest, whatever older ones were worth."""
    names = ["e01", "e02", "e12", "e03", "e13", "e23"]
    kinds = ["zero", "skip", "pool", "conv1", "conv3"]
    named = ", ".join(f"{name}={{{name}}}" for name in names)
    space = Space.of({"model": f"cell_network({named})", **dict.fromkeys(names, kinds)})
    rng, ended = Random(0), list[Parent]()
    for number in range(600):
        parameters = evolved(ended, space, population=50, sample=10, rng=rng)
        model = space.chosen_options(parameters)["model"]
        ended.append(Parent(number, parameters, model.count("conv3") / 6))
    assert max(parent.value for parent in ended) == 1.0
    assert max(parent.value for parent in ended[:50]) < 1.0
