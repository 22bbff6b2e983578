"""Search spaces: what they refuse, what they draw, and that a grid has everything once."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.search.space import Domain, Range, Space, Values

TREE = {
    "strategy": ["synchronous", "local_sgd(steps={period})", "{served}"],
    "period": [2, 4, 8],
    "served": ["parameter_server(servers={servers})", "downpour"],
    "servers": {"from": 1, "to": 2},
    "batch_size": [16, 32],
    "epochs": 3,
}


def by_chance(seed: int) -> Any:
    rng = Random(seed)
    return lambda name, domain: domain.draw(rng)


def test_only_what_matters_is_drawn_and_filled_in() -> None:
    space = Space.of(TREE)
    seen = set()
    for seed in range(200):
        parameters = space.draw(by_chance(seed))
        options = space.run_options(parameters)
        assert set(options) == {"strategy", "batch_size", "epochs"}
        assert options["epochs"] == 3
        assert "epochs" not in parameters
        assert "{" not in options["strategy"]
        assert ("period" in parameters) == options["strategy"].startswith("local_sgd")
        assert ("servers" in parameters) == options["strategy"].startswith("parameter_server")
        seen.add(options["strategy"])
    expected = {"synchronous", *(f"local_sgd(steps={each})" for each in (2, 4, 8)), "downpour"}
    assert seen == expected | {f"parameter_server(servers={each})" for each in (1, 2)}


def test_a_grid_has_every_combination_once() -> None:
    space = Space.of(TREE)
    found = [tuple(sorted(space.run_options(each).items())) for each in space.every()]
    strategies = ["synchronous", "downpour", *(f"local_sgd(steps={each})" for each in (2, 4, 8))]
    strategies += [f"parameter_server(servers={each})" for each in (1, 2)]
    expected = {
        tuple(sorted({"strategy": strategy, "batch_size": size, "epochs": 3}.items()))
        for strategy, size in itertools.product(strategies, (16, 32))
    }
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize(
    ("domain", "every"),
    [
        (Range(1, 3, whole=True), [1, 2, 3]),
        (Range(16, 60, step=16, whole=True), [16, 32, 48]),
        (Range(0.1, 0.5, step=0.1), [0.1, 0.2, 0.3, 0.4, 0.5]),
        (Range(0.1, 0.5), None),
        (Range(1, 64, log=True, whole=True), None),
        (Values(("a", 1)), ["a", 1]),
    ],
)
def test_what_a_domain_holds(domain: Domain, every: list[Any] | None) -> None:
    assert domain.every() == (None if every is None else pytest.approx(every) if every[0] != "a" else every)
    rng = Random(1)
    for _ in range(200):
        value = domain.draw(rng)
        for each in (value, domain.near(value, rng)):
            if isinstance(domain, Range):
                assert domain.low <= each <= domain.high
                assert isinstance(each, int) == domain.whole
            if every is not None and isinstance(value, int | float):
                assert (
                    any(each == pytest.approx(known) for known in every if not isinstance(known, str))
                    or each == "a"
                )


def test_logarithmic_draws_are_uniform_in_the_exponent() -> None:
    rng, domain = Random(3), Range(1e-4, 1.0, log=True)
    drawn = [domain.draw(rng) for _ in range(4000)]
    for decade in range(4):
        share = sum(10.0 ** (decade - 4) <= value < 10.0 ** (decade - 3) for value in drawn) / len(drawn)
        assert share == pytest.approx(0.25, abs=0.03)


def test_a_mutation_differs_in_one_place_and_what_hangs_on_it() -> None:
    space = Space.of({**TREE, "lr": {"from": 0.01, "to": 1.0, "log": True}})
    for seed in range(100):
        before = space.draw(by_chance(seed))
        after = space.mutate(before, Random(seed))
        changed = {name for name in before if name in after and before[name] != after[name]}
        assert len(changed) == 1
        hanging = {"period", "served", "servers"}
        if changed <= {"strategy", "served"}:
            assert set(before) ^ set(after) <= hanging
        else:
            assert set(before) == set(after)


def test_what_is_explored_is_near_or_drawn_anew() -> None:
    space = Space.of({"lr": {"from": 0.01, "to": 1.0, "log": True}})
    factors = [space.explore({"lr": 0.1}, Random(seed))["lr"] / 0.1 for seed in range(400)]
    near = [factor for factor in factors if factor == pytest.approx(0.8) or factor == pytest.approx(1.2)]
    assert len(near) / len(factors) == pytest.approx(0.75, abs=0.07)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be lines of"),
        ({}, "must be lines of"),
        ({"bach_size": [1, 2]}, "did you mean batch_size"),
        ({"batch_size": []}, "batch_size has no values"),
        ({"batch_size": [1, 1]}, "has a value twice"),
        ({"batch_size": [[1]]}, "a list holds numbers and texts"),
        ({"batch_size": {"from": 1}}, "a range is"),
        ({"batch_size": {"from": 1, "to": 2, "by": 3}}, "a range is"),
        ({"batch_size": {"from": 2, "to": 2}}, "from must be below to"),
        ({"batch_size": {"from": 1, "to": 4, "step": 9}}, "at most their distance"),
        ({"batch_size": {"from": "a", "to": 4}}, "must be numbers"),
        ({"batch_size": {"from": 1, "to": float("inf")}}, "must be numbers"),
        ({"lr": {"from": 0, "to": 1, "log": True}}, "needs numbers above 0"),
        ({"lr": {"from": 1, "to": 2, "log": "yes"}}, "log is true or false"),
        ({"seed": [1, 2]}, "seed is no choice"),
        ({"strategy": "local_sgd(steps={period})"}, "add a line `period: "),
        ({"strategy": "{a}", "a": "{b}", "b": "x{a}"}, "names itself"),
        ({"period": [1, 2]}, "unknown option of the space 'period'"),
        ({"learning_rate": [0.1, 0.2]}, "learning rate is called lr (given learning_rate)"),
    ],
)
def test_what_is_no_space_is_refused_in_a_line(given: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Space.of(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_grid_needs_an_end() -> None:
    with pytest.raises(RequestError, match="a grid cannot try all of lr: give a list"):
        Space.of({"lr": {"from": 0.1, "to": 1.0}}).every()


def test_a_space_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("lr: {from: 0.1, to: 1, log: true}\nbatch-size: [8, 16]\n", encoding="utf-8")
    space = Space.read(path)
    assert space.options == {"lr": Range(0.1, 1, log=True), "batch_size": Values((8, 16))}
    path.write_text("lr: [1]\nlr: [2]\n", encoding="utf-8")
    with pytest.raises(RequestError, match="lr"):
        Space.read(path)
