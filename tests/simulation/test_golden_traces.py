"""The first messages of every strategy, against traces that a person has looked at."""

import pytest

from simulation.traces import GOLDEN, MESSAGES, default_strategies, trace


def test_every_strategy_has_a_golden_trace():
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(default_strategies())


@pytest.mark.parametrize("name", default_strategies())
def test_the_first_messages_are_the_golden_ones(name):
    golden = (GOLDEN / f"{name}.txt").read_text()
    assert 10 <= golden.count("\n") <= MESSAGES  # hogwild says nothing but where it is
    assert trace(name) == golden
